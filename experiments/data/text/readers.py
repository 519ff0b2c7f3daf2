"""Reads parallel text: lines, tab-separated tables, Hugging Face datasets."""

import collections
import contextlib
import gzip
import itertools
import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from experiments.config import TextConfig
from experiments.data.text import huggingface, registry
from experiments.data.text.tokenizer import normalized
from experiments.errors import UserError, counted


class ParallelText(NamedTuple):
  """N sentences and their translations, normalised."""

  source: Sequence[str]
  target: Sequence[str]


def pairs(
  config: TextConfig, path: str, *, field: str
) -> Iterator[tuple[str, str]]:
  """Yields the pairs of a path, as they are; messages name the field."""
  if config.format == "huggingface":
    return huggingface.pairs(config, path, field=field)
  if config.format == "tsv":
    return _table_rows(*files(config, path, field=field), field=field)
  source, target = files(config, path, field=field)
  return _line_pairs(source, target, fields=(field, field))


def files(config: TextConfig, path: str, *, field: str) -> list[Path]:
  """Returns the files of a path; a Hugging Face dataset has none."""
  prefix = Path(config.dir, path).expanduser()
  names = {
    "huggingface": [],
    "tsv": [prefix],
    "lines": [Path(f"{prefix}.{x}") for x in (config.source, config.target)],
  }
  return [_existing(name, field) for name in names[config.format]]


def read_pair(
  source: Path, target: Path, *, fields: tuple[str, str]
) -> ParallelText:
  """Reads all pairs of two files, each plain or .gz; messages name `fields`."""
  source, target = map(_existing, (source, target), fields)
  sides: tuple[list[str], list[str]] = ([], [])
  for pair in _line_pairs(source, target, fields=fields):
    for side, line in zip(sides, pair):
      side.append(normalized(line))
  return ParallelText(*sides)


def read_lines(file: Path, *, field: str = "") -> Iterator[str]:
  """Yields the normalised lines of a text file, plain or .gz.

  Errors name `field`, if given.
  """
  return map(normalized, _decoded(file, field))


def open_bytes(file: Path, name: str = "") -> BinaryIO:
  """Opens a file, plain or .gz, to read its lines as bytes."""
  with _naming(name or str(file)):
    return cast(BinaryIO, _opener(file)(file, "rb"))


def num_lines(file: Path) -> int:
  """Returns the number of lines of a file, plain or .gz."""
  with _naming(str(file)), open_bytes(file) as stream:
    return sum(1 for _ in stream)


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
  """Yields lines of UTF-8 unchanged, without the byte order mark."""
  with _naming(name):
    for number, line in enumerate(stream, 1):
      try:
        yield line.decode("utf-8-sig" if number == 1 else "utf-8")
      except UnicodeDecodeError as error:
        raise UserError(
          f"{name}, line {number}: not UTF-8 ({error.reason} at byte"
          f" {error.start + 1}); convert it, as with iconv -t utf-8"
        ) from error


def has_text(pair: tuple[str, str]) -> bool:
  """Whether both sides of a pair have text."""
  source, target = pair
  return bool(source.strip() and target.strip())


def _line_pairs(
  source: Path, target: Path, *, fields: tuple[str, str]
) -> Iterator[tuple[str, str]]:
  sides = _decoded(source, fields[0]), _decoded(target, fields[1])
  for number, (one, other) in enumerate(itertools.zip_longest(*sides)):
    if one is None or other is None:
      rest = 1 + sum(1 for _ in sides[one is None])
      counts = [number, number]
      counts[one is None] += rest
      raise UserError(
        f"{fields[0]}: {source} has {counted(counts[0], 'line')} and {target}"
        f" has {counts[1]:,}; line i of one must translate line i of the other"
      )
    yield one, other


def _existing(file: Path, field: str) -> Path:
  """Returns the path of the file, or of the same file with .gz."""
  packed = Path(f"{file}.gz")
  # Unlike os.path.isfile, Path.is_file raises if a folder cannot be entered.
  for each in (file, packed):
    if os.path.isfile(each):
      return each
  raise UserError(
    f"{field}: no file {file} or {packed.name}; {_hint(file, field)}"
  )


def _hint(file: Path, field: str) -> str:
  """Returns the end of a message: what to do if there is no such file."""
  for name, corpus in registry.CORPORA.items():
    if any(each.name == file.name for each in corpus.files):
      return (
        f"download it: python -m experiments.download {name} DIR, and pass"
        " --config.data.dir=DIR"
      )
  present = sorted(filter(os.path.isfile, file.parent.glob("[!.]*")))
  if not os.path.isdir(file.parent):
    return f"there is no folder {file.parent}"
  if not present:
    return f"{file.parent} is empty"
  names = ", ".join(each.name for each in present[:12])
  more = ", ..." if len(present) > 12 else ""
  found = f"in {file.parent} there are {names}{more}"
  if not field.startswith("config.data") or file.parent != Path():
    return found
  return (
    f"{found}; set --config.data.train and --config.data.splits.*, or"
    " --config.data.dir"
  )


def _decoded(file: Path, field: str = "") -> Iterator[str]:
  """Yields the lines of a file unchanged."""
  empty, options = True, {"encoding": "utf-8-sig", "newline": "\n"}
  try:
    # Decoding many lines at once is faster than `decode_lines`.
    with _naming(str(file)), _opener(file)(file, "rt", **options) as lines:
      for line in lines:
        empty = False
        yield line
  except UnicodeDecodeError:
    with open_bytes(file) as stream:
      collections.deque(decode_lines(stream, str(file)), 0)  # names the line
    raise
  if empty:
    prefix = f"{field}: " if field else ""
    raise UserError(f"{prefix}{file} is empty")


def _opener(file: Path) -> Callable[..., Any]:
  """Returns the function that opens a file, plain or .gz."""
  return gzip.open if file.suffix == ".gz" else open


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
  """Names the file that cannot be read."""
  try:
    yield
  except (OSError, EOFError, zlib.error) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"{name}: cannot be read ({reason})") from error


def _table_rows(file: Path, *, field: str) -> Iterator[tuple[str, str]]:
  for number, line in enumerate(_decoded(file, field), 1):
    source, *others = line.split("\t")
    if not others and source.strip():
      raise UserError(
        f"{file}, line {number}: no tab; a line is source, tab, target"
      )
    if len(others) > 1 and "".join(others[1:]).strip():
      raise UserError(
        f"{file}, line {number}: {1 + len(others)} columns; a line is source,"
        f" tab, target: cut -f1,2 {shlex.quote(file.name)}"
      )
    yield source, others[0] if others else ""
