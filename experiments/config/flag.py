"""The flag `--config`: its parser, which reports errors, and its values."""

import ast
import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments.config.unknown_field import no_such_field
from experiments.errors import UserError

# Files that hold no config of their own, in configs/ and beside it.
_NO_CONFIGS = ("__init__.py", "base.py", "conftest.py")


def install_parser() -> None:
  """Installs a parser of `--config` that checks file and field names."""
  flags.FLAGS["config"].parser = _Parser(flags.FLAGS["config"].parser)
  for kind, parser in (
    (int, _Integer()),
    (bool, _Boolean()),
    (float, _FloatOrNone()),
    (type(None), _FloatOrNone()),
    (ConfigDict, _Section()),
  ):
    config_flags.register_flag_parser_for_type(kind, parser)


def config_arguments() -> list[str]:
  """Returns the flags that give another process the same config."""
  flag = flags.FLAGS["config"]
  values = config_flags.get_override_values(flag)
  return [
    f"--config={config_flags.get_config_filename(flag)}",
    *(f"--config.{field}={_text(value)}" for field, value in values.items()),
  ]


def _text(value: Any) -> str:
  """A config value as a flag parses it."""
  # The text of a section is YAML.
  is_section = isinstance(value, ConfigDict)
  return repr(value.to_dict()) if is_section else str(value)


def default_workdir() -> Path:
  """Returns runs/reverse-dot for `--config=configs/reverse.py:dot`."""
  config = config_flags.get_config_filename(flags.FLAGS["config"])
  path, _, argument = config.partition(":")
  parts = [Path(path).stem, *argument.split(",")]
  return Path("runs") / "-".join(part for part in parts if part)


class _Integer(flags.IntegerParser):
  def convert(self, argument):
    with _refusing("must be an integer"):
      return super().convert(argument)


class _Boolean(flags.BooleanParser):
  def parse(self, argument):
    with _refusing("must be true or false"):
      return super().parse(argument)


class _FloatOrNone(flags.FloatParser):
  """A number or None; `parse` later rejects None for a required field."""

  def convert(self, argument):
    with _refusing("must be a number"):
      return None if argument == "None" else super().convert(argument)


class _Section(flags.ArgumentParser):
  def parse(self, argument):
    if isinstance(argument, ConfigDict):  # the value in the config file
      return argument
    with _refusing("is a section; set its fields, as --config.train.steps=100"):
      return ConfigDict(dict(ast.literal_eval(argument)))


@contextlib.contextmanager
def _refusing(reason: str) -> Iterator[None]:
  """Replaces the messages of Python, before which absl writes the flag."""
  try:
    yield
  except (SyntaxError, TypeError, ValueError):
    raise ValueError(reason) from None


class _Parser(flags.ArgumentParser):
  """Loads a config file with the parser of ml_collections."""

  def __init__(self, parser: flags.ArgumentParser):
    self.parser = parser

  def parse(self, path):
    file = Path(path.partition(":")[0])
    words = [word for word in sys.argv[1:] if word.startswith("-")]
    given = [word.lstrip("-").partition("=")[0] for word in words]
    if given.count("config") > 1:
      raise UserError("--config is given more than once; give one config")
    if not path:
      raise UserError("--config=: give a config, as configs/reverse.py")
    if file.is_dir():
      raise UserError(
        f"--config={file}: is a folder; give one of its files"
        f"{_other_files(file)}"
      )
    if not file.is_file():
      raise UserError(f"--config={file}: no such file{_other_files(file)}")
    if file.suffix != ".py":
      raise UserError(
        f"--config={file}: a config is a Python file{_other_files(file)}"
      )
    try:
      config = self.parser.parse(path)
      # The parser does not raise an OSError: it stores the error as `_error`.
      if failure := getattr(config, "__dict__", {}).get("_error"):
        raise failure
    except UserError as error:  # of the argument
      raise UserError(f"--config={path}: {error}") from error
    except (Exception, SystemExit) as error:
      # The parser extends a TypeError or ValueError to several lines of text.
      cause = error.__context__ or error
      raise UserError(_located(cause, file)) from error
    if not isinstance(config, ConfigDict):
      raise UserError(
        f"--config={file}: get_config returned {type(config).__name__},"
        " not an ml_collections.ConfigDict"
      )
    for flag in given:
      if flag.startswith("config."):
        _check_field(config, flag)
    return config


def _other_files(file: Path) -> str:
  """Returns the end of a message: the file of a similar name, or all files."""
  folders = {file if file.is_dir() else file.parent, Path("configs")}
  known = {
    path.stem: path
    for folder in folders
    for path in sorted(folder.glob("*.py"))
    if path.name not in _NO_CONFIGS
  }
  # The last name of configs/copy, of configs.copy and of configs/cpy.py.
  name = re.split("[./]", str(file).removesuffix(".py"))[-1]
  if close := difflib.get_close_matches(name, known, n=1):
    return f"; did you mean {known[close[0]]}?"
  files = ", ".join(sorted(map(str, known.values())))
  return f"; existing files: {files}" if files else ""


def _check_field(config: ConfigDict, flag: str) -> None:
  """Raises UserError if a flag overrides a field that does not exist."""
  section, place = config, "config"
  for name in flag.split(".")[1:]:
    known = list(section) if isinstance(section, ConfigDict) else []
    place = f"{place}.{name}"
    if name not in known:
      message = no_such_field(place, known)
      others = [] if "did you mean" in message else _places(config, name)
      hint = f"; did you mean {' or '.join(others)}?" if others else ""
      raise UserError(f"--{message}{hint}")
    section = section[name]


def _places(section: ConfigDict, name: str, path: str = "config") -> list[str]:
  """Returns the fields of this name in all sections."""
  found = [f"--{path}.{name}"] if name in section else []
  for key, value in section.items():
    if isinstance(value, ConfigDict):
      found += _places(value, name, f"{path}.{key}")
  return found


def _located(error: BaseException, file: Path) -> str:
  """Formats an error of a config file as a line with its position."""
  if isinstance(error, AttributeError) and error.name == "get_config":
    return (
      f"{file}: has no get_config(arg), which returns a ConfigDict; see"
      " configs/reverse.py"
    )
  libraries = ("/ml_collections/", "/absl/", __file__)
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if not frame.filename.startswith("<")
    and not any(part in frame.filename for part in libraries)
  ]
  place = str(file)
  if frames:
    place = f"{os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}"
  return f"{place}: {type(error).__name__}: {error}"
