"""The one exception that a user's mistake becomes."""


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
