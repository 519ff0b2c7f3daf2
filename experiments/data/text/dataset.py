"""Parallel text as a dataset, loaded from a run directory.

    tokenizer/source.model, target.model   SentencePiece models
    data/SPLIT.en, SPLIT.de                evaluation sets, a sentence a line

`prepare` writes these files.
"""

import functools
from pathlib import Path

import numpy as np

from experiments.config import NumbersConfig, TranslationConfig
from experiments.data import gold_alignments
from experiments.data.batch import PAD, UNK, Batch
from experiments.data.dataset import BatchShard, EvaluationSet
from experiments.data.gold_alignments import GoldAlignments
from experiments.data.text import readers
from experiments.data.text.corpus import BucketedBatches, ParallelCorpus, padded
from experiments.data.text.readers import ParallelText
from experiments.data.text.tokenizer import Tokenizer
from experiments.errors import UserError

TOKENIZER, DATA = "tokenizer", "data"
SIDES = ("source", "target")
# The longest prediction, relative to the average target of such a source.
_LENGTH_FACTOR = 1.5
# Shorter sources, whose ratios vary most, count as this long.
_MIN_SOURCE_LENGTH = 16
# Lengths of predictions are multiples of this, so that few are compiled.
_LENGTH_STEP = 8


class TranslationDataset:
  """Parallel text, tokenized; see `Dataset` for its methods.

  Attributes:
    source: the source tokenizer.
    target: the target tokenizer.
    corpus: the training pairs; None if the run is not trained.
  """

  def __init__(
    self,
    config: TranslationConfig,
    workdir: Path,
    source: Tokenizer,
    target: Tokenizer,
    corpus: ParallelCorpus | None,
  ):
    self._config, self._workdir = config, workdir
    self.source, self.target, self.corpus = source, target, corpus

  @property
  def source_vocabulary_size(self) -> int:
    """Number of source tokens, special ones included."""
    return self.source.vocabulary_size

  @property
  def target_vocabulary_size(self) -> int:
    """Number of target tokens, special ones included."""
    return self.target.vocabulary_size

  @property
  def shared_vocabulary(self) -> bool:
    """Whether source and target have the same token ids."""
    return self._config.joint_vocabulary

  @property
  def max_length(self) -> int:
    """The longest source or target, EOS included."""
    return self._config.max_length

  def training_batches(
    self, *, seed: int, size: int, unit: str, multiple: int, shard: BatchShard
  ) -> BucketedBatches:
    """Returns the training batches by step."""
    assert self.corpus is not None
    return self.corpus.training_batches(
      seed=seed, size=size, unit=unit, multiple=multiple, shard=shard
    )

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name in `config.data.splits`."""
    folder = self._workdir / DATA
    sides = [
      list(readers.read_lines(folder / f"{split}.{language}"))
      for language in (self._config.source, self._config.target)
    ]
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
    """Returns the longest prediction for sources of a length."""
    average = self._length_ratio * max(source_length, _MIN_SOURCE_LENGTH)
    length = -(-int(_LENGTH_FACTOR * average) // _LENGTH_STEP) * _LENGTH_STEP
    return min(length, self.max_length)

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns the texts of target tokens [N, T]; each ends before its EOS."""
    return self.target.decode(tokens)

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns the alignment of English and Korean number names.

    It is None for other text, and for a name that was cut within a word.
    """
    languages = self._config.source, self._config.target
    numeric = isinstance(self._config, NumbersConfig)
    if not numeric or languages != ("en", "ko"):
      return None
    words = (
      ["" if token <= UNK else word for token, word in zip(tokens, named)]
      for tokens, named in (
        (source, self.source.words(source)),
        (target, self.target.words(target)),
      )
    )
    try:
      return gold_alignments.number_alignments(*words)
    except ValueError:
      return None

  def source_words(self, tokens: np.ndarray) -> list[str]:
    """Returns the labels of source tokens [L] in figures."""
    return self.source.words(tokens)

  def target_words(self, tokens: np.ndarray) -> list[str]:
    """Returns the labels of target tokens [L] in figures."""
    return self.target.words(tokens)


def load(config: TranslationConfig, workdir: Path) -> TranslationDataset:
  """Loads the dataset of a run directory, without its training pairs."""
  tokenizers: list[Tokenizer] = []
  for side in SIDES:
    path = workdir / TOKENIZER / f"{side}.model"
    try:
      tokenizers.append(Tokenizer(path.read_bytes()))
    except OSError as error:
      raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
      raise UserError(f"{path}: {error}") from error
  source, target = tokenizers
  return TranslationDataset(config, workdir, source, target, None)
