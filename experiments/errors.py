"""The exception for errors that a user can correct, and exit codes."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

# Exit code of a run that was stopped and resumes when it is started again, so
# that a scheduler may requeue it (EX_TEMPFAIL of sysexits.h).
AGAIN = 75


class UserError(Exception):
  """An error that the user can correct: one message, no traceback."""

  code = 2  # the exit code of the process


class StoppedError(UserError):
  """A signal stopped the process; the same command continues."""

  code = AGAIN


class NoRunError(UserError):
  """A folder that should be a run directory is none."""


def counted(count: int, noun: str) -> str:
  """Returns a count and its noun, for a message.

  Example:
    >>> counted(1, "line"), counted(1200, "line")
    ('1 line', '1,200 lines')
  """
  return f"{count:,} {noun}{'' if count == 1 else 's'}"


def suggestion(name: str, known: Iterable[str]) -> str:
  """Returns the end of a message about a name that is not one of `known`.

  Example:
    >>> suggestion("aditive", ["dot", "additive"])
    "; did you mean 'additive'?"
  """
  close = difflib.get_close_matches(name, known, n=1)
  return f"; did you mean {close[0]!r}?" if close else ""


@contextlib.contextmanager
def naming_field(field: str, workdir: object) -> Iterator[None]:
  """Names the field of a config that names a run, in place of --workdir."""
  try:
    with naming_arguments():
      yield
  except UserError as error:
    reason = str(error).removeprefix(f"workdir={workdir}: ")
    run, _, checkpoint = str(workdir).rpartition(":")
    has_checkpoint = run and "/" not in checkpoint
    if has_checkpoint and isinstance(error, NoRunError):
      reason = (
        "no run directory has this name; a checkpoint after the colon is last,"
        " best, last:N, best:N or a step"
        f"{suggestion(checkpoint, ('last', 'best'))}"
      )
    raise UserError(f"{field}: {reason}") from error


@contextlib.contextmanager
def naming_arguments() -> Iterator[None]:
  """Names arguments of a function, where messages name the flags of a binary.

  Example:
    >>> with naming_arguments():
    ...   raise UserError("--workdir=run: not a run directory")
    Traceback (most recent call last):
    experiments.errors.UserError: workdir=run: not a run directory
  """
  try:
    yield
  except UserError as error:
    message = re.sub(r"(?<!\S)--(?=[a-z_]+\b)", "", str(error))
    kind = NoRunError if isinstance(error, NoRunError) else UserError
    raise kind(message) from error
