"""Parallel text as a dataset, from what a run's directory keeps of it.

    tokenizer/source.model, target.model   SentencePiece
    data/SPLIT.en, SPLIT.de                a sentence a line

`preparation` writes these files.
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
# How much longer than usual an answer may be.
_LENIENCE = 1.5
# Of sources shorter than this too much is unusual.
_SHORT = 16
# Lengths of answers are multiples of this, so that few loops are compiled.
_LENGTH_STEP = 8


class TranslationDataset:
  """A parallel corpus, or what of it a run's directory keeps.

  Attributes:
    source: turns sources into tokens.
    target: turns targets into tokens.
    corpus: the training pairs; None where a run is only used.

  Example:
    >>> data = load(run.config.data, workdir)  # doctest: +SKIP
    >>> data.target.decode(answers)  # doctest: +SKIP
    ['Zwei Hunde rennen durch den Schnee.']
  """

  def __init__(
    self,
    config: TranslationConfig,
    workdir: Path,
    source: Tokenizer,
    target: Tokenizer,
    corpus: ParallelCorpus | None,
  ):
    """Made by `prepare` and `load`."""
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
    """Whether equal ids mean the same on both sides."""
    return self._config.joint_vocabulary

  @property
  def max_length(self) -> int:
    """The longest source or target, EOS included."""
    return self._config.max_length

  def training_batches(
    self, *, seed: int, size: int, unit: str, multiple: int, shard: BatchShard
  ) -> BucketedBatches:
    """Returns the batches of training, by step."""
    assert self.corpus is not None
    return self.corpus.training_batches(
      seed=seed, size=size, unit=unit, multiple=multiple, shard=shard
    )

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name of `config.data.splits`."""
    folder = self._workdir / DATA
    sides = [
      list(readers.read_lines(folder / f"{split}.{language}"))
      for language in (self._config.source, self._config.target)
    ]
    return self.encode(ParallelText(*sides))

  def encode(self, text: ParallelText) -> EvaluationSet:
    """Turns text into an evaluation set; long sentences are cut.

    Args:
      text: N pairs.

    Returns:
      The set, as wide as its longest sentence.
    """
    longest = self.max_length - 1
    sides = self.source.encode(text.source), self.target.encode(text.target)
    cut = sum(max(map(len, pair)) > longest for pair in zip(*sides))
    rows = [[row[:longest] for row in side] for side in sides]
    widths = [1 + max(map(len, side), default=0) for side in rows]
    return EvaluationSet(Batch(*map(padded, rows, widths)), text, cut)

  @functools.cached_property
  def _length_ratio(self) -> float:
    """How much longer than sources targets are, in the validation set."""
    source, target = self.evaluation_set("validation").batch
    return float((target != PAD).sum() / (source != PAD).sum())

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the longest answer to sources of so many tokens."""
    likely = self._length_ratio * max(source_length, _SHORT)
    length = -(-int(_LENIENCE * likely) // _LENGTH_STEP) * _LENGTH_STEP
    return min(length, self.max_length)

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns target tokens [N, T] as N texts; EOS ends each."""
    return self.target.decode(tokens)

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns which tokens of a pair belong together.

    Args:
      source: [S] token ids.
      target: [T] token ids.

    Returns:
      The links of a number's English and Korean names; None of other text, and
      of a name that was cut within a word.
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
    """Names [L] source tokens for a reader."""
    return self.source.words(tokens)

  def target_words(self, tokens: np.ndarray) -> list[str]:
    """Names [L] target tokens for a reader."""
    return self.target.words(tokens)


def load(config: TranslationConfig, workdir: Path) -> TranslationDataset:
  """Loads what a run's directory keeps of its corpus.

  Args:
    config: `config.data`.
    workdir: the run's directory.

  Returns:
    The dataset, without training pairs.

  Raises:
    UserError: if a tokeniser is missing or damaged.

  Example:
    >>> data = load(run.config.data, workdir)  # doctest: +SKIP
  """
  tokenizers: list[Tokenizer] = []
  for side in SIDES:
    path = workdir / TOKENIZER / f"{side}.model"
    try:
      tokenizers.append(Tokenizer(path.read_bytes()))
    except OSError as error:
      raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
      raise UserError(f"{path}: {error}") from None
  source, target = tokenizers
  return TranslationDataset(config, workdir, source, target, None)
