"""The exception for errors that a user can correct, and exit codes."""

# Exit code of a run that was stopped and resumes when it is started again, so
# that a scheduler may requeue it (EX_TEMPFAIL of sysexits.h).
AGAIN = 75


class UserError(Exception):
  """An error that the user can correct: one message, no traceback."""

  code = 2  # the exit code of the process
