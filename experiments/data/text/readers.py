"""Reads parallel text: lines, tab-separated tables, Hugging Face datasets."""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.config import TextConfig
from experiments.data.text import huggingface
from experiments.data.text.tokenizer import normalized
from experiments.errors import UserError


class ParallelText(NamedTuple):
  """N sentences and their translations, normalised."""

  source: Sequence[str]
  target: Sequence[str]


def read(config: TextConfig, path: str, *, field: str) -> ParallelText:
  """Reads all pairs of a path; error messages name the config field."""
  if config.format == "huggingface":
    return ParallelText(*huggingface.columns(config, path, field=field))
  prefix = Path(config.dir, path).expanduser()
  if config.format == "tsv":
    return _read_table(_existing(prefix, field))
  source, target = (
    Path(f"{prefix}.{language}") for language in (config.source, config.target)
  )
  return read_pair(source, target, fields=(field, field))


def read_pair(
  source: Path, target: Path, *, fields: tuple[str, str]
) -> ParallelText:
  """Reads all pairs of two files, each plain or .gz; messages name `fields`."""
  files = [_existing(*each) for each in zip((source, target), fields)]
  text = ParallelText(*(list(read_lines(file)) for file in files))
  if len(text.source) != len(text.target):
    raise UserError(
      f"{fields[0]}: {files[0]} has {len(text.source):,} lines and {files[1]}"
      f" has {len(text.target):,}; line i of one must translate line i of the"
      " other"
    )
  return text


def read_lines(file: Path) -> Iterator[str]:
  """Yields the normalised lines of a text file, plain or .gz."""
  return map(normalized, _decoded(file))


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
  """Yields lines of UTF-8 unchanged, without the byte order mark."""
  for number, line in enumerate(stream, 1):
    try:
      yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
      raise UserError(
        f"{name}, line {number}: not UTF-8 ({error.reason} at byte"
        f" {error.start + 1}); convert it, as with iconv -t utf-8"
      ) from error


def drop_blank_pairs(text: ParallelText) -> ParallelText:
  """Returns the pairs that have text on both sides."""
  pairs = [pair for pair in zip(*text) if all(pair)]
  return ParallelText(*([pair[side] for pair in pairs] for side in (0, 1)))


def _existing(file: Path, field: str) -> Path:
  """Returns the path of the file, or of the same file with .gz."""
  packed = Path(f"{file}.gz")
  # Unlike os.path.isfile, Path.is_file raises if a folder cannot be entered.
  for each in (file, packed):
    if os.path.isfile(each):
      return each
  present = sorted(filter(os.path.isfile, file.parent.glob("*")))
  if not os.path.isdir(file.parent):
    hint = f"there is no folder {file.parent}"
  elif present:
    names = ", ".join(each.name for each in present[:12])
    hint = f"in {file.parent} there are {names}"
    hint += ", ..." if len(present) > 12 else ""
  else:
    hint = f"{file.parent} is empty"
  raise UserError(f"{field}: no file {file} or {packed.name}; {hint}")


def _decoded(file: Path) -> Iterator[str]:
  """Yields the lines of a file unchanged."""
  empty = True
  try:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
      for line in decode_lines(stream, str(file)):
        empty = False
        yield line
  except (OSError, EOFError, zlib.error) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"{file}: cannot be read ({reason})") from error
  if empty:
    raise UserError(f"{file}: empty")


def _read_table(file: Path) -> ParallelText:
  rows = []
  for number, line in enumerate(_decoded(file), 1):
    cells = [normalized(cell) for cell in line.split("\t")]
    if len(cells) < 2 and any(cells):
      raise UserError(
        f"{file}, line {number}: no tab; a line is source, tab, target"
      )
    rows.append([*cells, ""][:2])
  source, target = map(list, zip(*rows))
  return ParallelText(source, target)
