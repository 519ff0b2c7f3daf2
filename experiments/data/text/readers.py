"""Parallel text from files: a sentence a line, tables, Hugging Face datasets.

Whatever is wrong with a file is one message that names it, and the line.
"""

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
  """Sentences and their translations, normalised.

  Attributes:
    source: N sentences.
    target: N sentences.
  """

  source: Sequence[str]
  target: Sequence[str]


class Filtered(NamedTuple):
  """What is left of a text, and how many pairs are not.

  Attributes:
    text: pairs with something on both sides.
    blank: number of pairs left out, since a side was blank.
  """

  text: ParallelText
  blank: int


def read(config: TextConfig, path: str, *, field: str) -> ParallelText:
  """Reads a text in the format that a config says.

  Args:
    config: `config.data`.
    path: one of its paths, relative to `config.dir`.
    field: the config field that the path comes from, for messages.

  Returns:
    All pairs, blank ones too.

  Raises:
    UserError: naming file and line, if a file is missing, empty, not UTF-8, or
      does not fit the other one.

  Example:
    >>> read(config.data, "corpus/train", field="config.data.train")
    ... # doctest: +SKIP
  """
  if config.format == "huggingface":
    return ParallelText(*huggingface.columns(config, path, field=field))
  place = Path(config.dir, path).expanduser()
  if config.format == "tsv":
    return _read_table(_existing(place, field))
  source, target = (
    Path(f"{place}.{language}") for language in (config.source, config.target)
  )
  return read_pair(source, target, fields=(field, field))


def read_pair(
  source: Path, target: Path, *, fields: tuple[str, str]
) -> ParallelText:
  """Reads two files of which one translates the other, line by line.

  Args:
    source: a file, plain or .gz; where it is missing, the same with .gz.
    target: likewise.
    fields: the config fields or flags that they come from, for messages.

  Returns:
    All pairs, blank ones too.

  Raises:
    UserError: naming file and line, if one is missing, empty or not UTF-8, or
      both numbers of lines, if they differ.

  Example:
    >>> fields = "--source", "--target"
    >>> read_pair(Path("a.en"), Path("a.de"), fields=fields)  # doctest: +SKIP
  """
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
  """Reads the lines of a text file, plain or .gz, normalised.

  Args:
    file: the file.

  Yields:
    Lines without their ends.

  Raises:
    UserError: naming the file, and the line, if it cannot be read, is empty
      or is not UTF-8.

  Example:
    >>> list(read_lines(Path("corpus/train.en")))  # doctest: +SKIP
    ['Two dogs run through the snow.']
  """
  return map(normalized, _decoded(file))


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
  r"""Decodes lines of UTF-8, with or without a byte order mark.

  Args:
    stream: lines.
    name: of the file, for messages.

  Yields:
    The lines as they are, with their ends.

  Raises:
    UserError: naming the line that is not UTF-8.

  Example:
    >>> list(decode_lines([b"a\n", b"b\n"], "standard input"))
    ['a\n', 'b\n']
  """
  for number, line in enumerate(stream, 1):
    try:
      yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
      raise UserError(
        f"{name}, line {number}: not UTF-8 ({error.reason} at byte"
        f" {error.start + 1}); convert it, as with iconv -t utf-8"
      ) from None


def drop_blank_pairs(text: ParallelText) -> Filtered:
  """Leaves out the pairs of which a side is blank.

  Args:
    text: normalised pairs.

  Returns:
    The others, and how many were left out.

  Example:
    >>> drop_blank_pairs(ParallelText(["a", "", "b"], ["c", "d", "e"]))
    Filtered(text=ParallelText(source=['a', 'b'], target=['c', 'e']), blank=1)
  """
  pairs = [pair for pair in zip(*text) if all(pair)]
  kept = (
    ParallelText(*map(list, zip(*pairs))) if pairs else ParallelText([], [])
  )
  return Filtered(kept, len(text.source) - len(pairs))


def _existing(file: Path, field: str) -> Path:
  """The file, or the same with .gz; an error if neither is there."""
  packed = Path(f"{file}.gz")
  # Of `os`, since those of Path raise where a folder may not be entered.
  for each in (file, packed):
    if os.path.isfile(each):
      return each
  there = sorted(filter(os.path.isfile, file.parent.glob("*")))
  if not os.path.isdir(file.parent):
    hint = f"there is no folder {file.parent}"
  elif there:
    names = ", ".join(each.name for each in there[:12])
    hint = f"in {file.parent} there are {names}"
    hint += ", ..." if len(there) > 12 else ""
  else:
    hint = f"{file.parent} is empty"
  raise UserError(f"{field}: no file {file} or {packed.name}; {hint}")


def _decoded(file: Path) -> Iterator[str]:
  """The lines of a file as they are."""
  empty = True
  try:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
      for line in decode_lines(stream, str(file)):
        empty = False
        yield line
  except (OSError, EOFError, zlib.error) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"{file}: cannot be read ({reason})") from None
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
