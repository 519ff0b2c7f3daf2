"""Parallel text as a dataset, loaded from the files that `prepare` writes."""

import functools
import math
from pathlib import Path

import numpy as np

from experiments.config import NumbersConfig, TrainConfig, TranslationConfig
from experiments.data.batch import PAD, UNK, Batch
from experiments.data.dataset import BatchShard, EvaluationSet
from experiments.data.gold_alignments import GoldAlignments, number_alignments
from experiments.data.text import readers
from experiments.data.text.corpus import BucketedBatches, ParallelCorpus, padded
from experiments.data.text.readers import ParallelText
from experiments.data.text.tokenizer import Tokenizer
from experiments.errors import UserError, counted
from experiments.run_directory import LocalFiles

TOKENIZER, DATA = "tokenizer", "data"
SIDES = ("source", "target")
# The maximum prediction length is this times the average target length of
# sources of the same length. Shorter sources than the minimum, whose ratios
# vary most, count as that long.
_LENGTH_FACTOR, _MIN_SOURCE_LENGTH = 1.5, 16


class TranslationDataset:
  """The tokenized text of a run directory as a `Dataset`."""

  def __init__(self, config: TranslationConfig, workdir: Path):
    self._config = config
    self._files = LocalFiles(workdir, evaluation_files(config))
    self.source, self.target = (
      _load_tokenizer(workdir, config, side) for side in SIDES
    )
    self.source_vocabulary_size = self.source.vocabulary_size
    self.target_vocabulary_size = self.target.vocabulary_size
    self.shared_vocabulary = config.joint_vocabulary
    self.max_length = config.max_length
    self.target_text = self.target.decode
    self.source_tokens, self.target_tokens = (
      self.source.encode,
      self.target.encode,
    )
    self.source_words, self.target_words = self.source.words, self.target.words
    self.corpus: ParallelCorpus | None = None  # `prepare` reads it for training

  def training_batches(
    self, train: TrainConfig, *, seed: int, shard: BatchShard
  ) -> BucketedBatches:
    """Returns the training batches by step."""
    assert self.corpus is not None
    return BucketedBatches(self.corpus, train, seed, shard)

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name in `config.data.splits`."""
    folder = self._files.path / DATA
    languages = self._config.source, self._config.target
    paths = [folder / f"{split}.{language}" for language in languages]
    sides = [list(readers.read_lines(path)) for path in paths]
    first, second = (counted(len(side), "line") for side in sides)
    if first != second:
      raise UserError(
        f"{paths[0]} has {first} and {paths[1]} has {second}; line i of one"
        " must translate line i of the other"
      )
    return self.encode(ParallelText(*sides))

  def encode(self, text: ParallelText) -> EvaluationSet:
    """Returns text as an evaluation set; too long sentences are cut."""
    longest = self.max_length - 1
    sides = self.source.encode(text.source), self.target.encode(text.target)
    cut = sum(max(map(len, pair)) > longest for pair in zip(*sides))
    rows = [[row[:longest] for row in side] for side in sides]
    widths = [1 + max(map(len, side), default=0) for side in rows]
    return EvaluationSet(Batch(*map(padded, rows, widths)), text, cut)

  @functools.cached_property
  def _length_ratio(self) -> float:
    """Target tokens per source token in the validation set."""
    source, target = self.evaluation_set("validation").batch
    return float((target != PAD).sum() / (source != PAD).sum())

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the maximum length of predictions for sources of a length."""
    return max_prediction_length(
      source_length, self._length_ratio, self.max_length
    )

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns the alignment of English and Korean number names, else None."""
    config = self._config
    languages = (config.source, config.target)
    if not isinstance(config, NumbersConfig) or languages != ("en", "ko"):
      return None
    source_words, target_words = (
      ["" if token <= UNK else word for token, word in zip(tokens, words)]
      for tokens, words in (
        (source, self.source_words(source)),
        (target, self.target_words(target)),
      )
    )
    try:
      return number_alignments(source_words, target_words)
    except ValueError:  # a name that was cut within a word
      return None


def evaluation_files(config: TranslationConfig) -> list[str]:
  """Returns the files of the evaluation sets in a run directory."""
  return [
    f"{DATA}/{split}.{language}"
    for split in config.splits
    for language in (config.source, config.target)
  ]


def max_prediction_length(
  source_length: int, length_ratio: float, max_length: int
) -> int:
  """Returns the maximum length for target tokens per source token."""
  average = length_ratio * max(source_length, _MIN_SOURCE_LENGTH)
  return min(math.ceil(_LENGTH_FACTOR * average), max_length)


def _load_tokenizer(
  workdir: Path, config: TranslationConfig, side: str
) -> Tokenizer:
  is_target = side == "target" and not config.joint_vocabulary
  settings = config.target_tokenizer if is_target else config.source_tokenizer
  path = workdir / TOKENIZER / f"{side}.model"
  try:
    return Tokenizer(path.read_bytes(), settings.kind)
  except OSError as error:
    raise UserError(f"{path}: cannot be read ({error.strerror})") from error
  except ValueError as error:
    raise UserError(f"{path}: {error}") from error
