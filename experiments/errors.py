"""The exception for errors that a user can correct, and exit codes."""

# Exit code of a run that was stopped and resumes when it is started again, so
# that a scheduler may requeue it (EX_TEMPFAIL of sysexits.h).
AGAIN = 75


class UserError(Exception):
  """An error that the user can correct: one message, no traceback.

  Attributes:
    code: the exit code of the process.

  Example:
    >>> raise UserError("config.train.steps: got -1; must be at least 1")
    Traceback (most recent call last):
    experiments.errors.UserError: config.train.steps: got -1; must be at least 1
  """

  code = 2
