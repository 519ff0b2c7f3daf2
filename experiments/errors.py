"""The one exception that a user's mistake becomes, and exit codes."""

# Of what was asked to stop and goes on when it is called again, so that a
# scheduler may requeue it: sysexits' "try again".
AGAIN = 75


class UserError(Exception):
  """Something the user can put right; shown as one message, no traceback.

  Attributes:
    code: what the process then exits with.

  Example:
    >>> raise UserError("config.train.steps: got -1; must be at least 1")
    Traceback (most recent call last):
    experiments.errors.UserError: config.train.steps: got -1; must be at least 1
  """

  code = 2
