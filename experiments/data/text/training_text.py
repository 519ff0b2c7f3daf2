"""The pairs of text of a config's sets, read from files or spelled out."""

import hashlib
import zlib
from collections.abc import Iterator

from experiments.config import NumbersConfig, TranslationConfig
from experiments.data.text import numbers, readers
from experiments.data.text.readers import ParallelText
from experiments.data.text.tokenizer import normalized


def pairs_of(
  config: TranslationConfig, split: str | None = None
) -> Iterator[tuple[str, str]]:
  """Yields the pairs of a set, or of the training text if `split` is None."""
  if isinstance(config, NumbersConfig):
    return zip(*_spelled(config, split))
  path = config.splits[split] if split else config.train
  field = f"splits.{split}" if split else "train"
  return readers.pairs(config, path, field=f"config.data.{field}")


def _spelled(config: NumbersConfig, split: str | None) -> ParallelText:
  wanted = config.splits[split] if split else config.train
  drawn = numbers.draw(
    {None: "train", "validation": "validation"}.get(split, "test"),
    wanted,
    seed=zlib.crc32(f"{config.seed} {split or 'train'}".encode()),
    field=f"config.data.{f'splits.{split}' if split else 'train'}",
  )
  return ParallelText(
    numbers.spelled(drawn, config.source, field="config.data.source"),
    numbers.spelled(drawn, config.target, field="config.data.target"),
  )


class TrainingText:
  """The training pairs, read anew by each iteration."""

  def __init__(self, config: TranslationConfig):
    self.config = config

  def __iter__(self) -> Iterator[tuple[str, str]]:
    return pairs_of(self.config)

  def files(self) -> dict[str, list[int]]:
    """Returns the size and time of change of each file."""
    config = self.config
    if isinstance(config, NumbersConfig):
      return {}
    files = readers.files(config, config.train, field="config.data.train")
    states = ((file, file.stat()) for file in files)
    return {str(file): [s.st_size, s.st_mtime_ns] for file, s in states}

  def digest(self) -> str:
    """Returns the hash that older versions recorded."""
    digest = hashlib.sha256()
    for side in (0, 1):
      for number, pair in enumerate(self):
        digest.update(b"\n" * (number > 0) + normalized(pair[side]).encode())
      digest.update(b"\0")
    return digest.hexdigest()
