"""What is wrong with a config file, or a flag that changes it, in a line."""

import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict, config_flags

from experiments.errors import UserError


def check_file(argv: Sequence[str], config: str | None) -> None:
  """Checks the file that a config flag names, before it is executed.

  Args:
    argv: the command line.
    config: the name of the flag, or None if there is none.

  Raises:
    UserError: if there is no such file, or it makes no config.

  Example:
    >>> check_file(["train", "--config=nowhere.py"], "config")
    Traceback (most recent call last):
    experiments.errors.UserError: --config=nowhere.py: no such file
  """
  for word, following in zip(argv, [*argv[1:], ""]):
    name, equals, value = word.lstrip("-").partition("=")
    if not config or name != config or not word.startswith("-"):
      continue
    path = Path((value if equals else following).partition(":")[0])
    if not path.is_file():
      near = sorted(str(each) for each in path.parent.glob("*.py"))
      there = f"; there are: {', '.join(near)}" if near else ""
      raise UserError(f"--{config}={path}: no such file{there}")
    text = path.read_text(encoding="utf-8", errors="replace")
    if "get_config" not in text:
      raise UserError(
        f"--{config}={path}: has no get_config(arg), which returns a"
        " ConfigDict; see configs/reverse.py"
      )


def last_line(error: Exception) -> str:
  r"""Says what went wrong, where a library's message is a whole traceback.

  Args:
    error: from parsing flags.

  Returns:
    A line, or the message as it is if it is no traceback.

  Example:
    >>> last_line(ValueError("Traceback (most recent call last):\n  x\nno y"))
    '--config: no y'
  """
  text = str(error).strip()
  if "Traceback" not in text:
    return text
  return f"--config: {text.splitlines()[-1].strip()}"


def explain_override(error: Exception, argv: Sequence[str]) -> str | None:
  r"""Names the `--config.field` that a config does not have.

  Args:
    error: what the config raised when the field was set.
    argv: the command line.

  Returns:
    A line, or None if the error is about something else.

  Example:
    >>> error = KeyError("Key 'step' does not exist. Did you mean \"steps\"?")
    >>> explain_override(error, ["--config.train.step=3"])
    "--config.train.step: no such field; did you mean 'steps'?"
  """
  found = re.search(r"'(\w+)\\?'", str(error))
  given = [word.lstrip("-").partition("=")[0] for word in argv]
  for name in given:
    if found and "." in name and found[1] in name.split("."):
      close = re.search(r'Did you mean "(\w+)"', str(error))
      hint = f"; did you mean {close[1]!r}?" if close else ""
      return f"--{name}: no such field{hint}"
  return None


def explain(error: Exception) -> str:
  """Says what a config file raised, and which of its lines did.

  Args:
    error: what it raised.

  Returns:
    A line.

  Example:
    >>> explain(ValueError("no such score"))
    'ValueError: no such score'
  """
  frames = traceback.extract_tb(error.__traceback__)
  ours = ("/ml_collections/", "/absl/", "/experiments/cli.py")
  outside = [
    frame
    for frame in frames
    if not any(part in frame.filename for part in ours)
    and not frame.filename.startswith("<")
  ]
  where = ""
  if outside:
    frame = outside[-1]
    where = f"{os.path.relpath(frame.filename)}, line {frame.lineno}: "
  return f"{where}{type(error).__name__}: {error}"


def check_value(flag) -> None:
  """Checks what `get_config` returned.

  Args:
    flag: the config flag, parsed.

  Raises:
    UserError: if it was not given, or is no ConfigDict.

  Example:
    >>> check_value(flags.FLAGS["config"])  # doctest: +SKIP
  """
  if not flag.present:
    raise UserError(
      f"--{flag.name} is required, such as --{flag.name}=configs/reverse.py"
    )
  if not isinstance(flag.value, ConfigDict):
    raise UserError(
      f"--{flag.name}={config_flags.get_config_filename(flag)}: get_config"
      f" returned {type(flag.value).__name__}, not an ml_collections.ConfigDict"
    )
