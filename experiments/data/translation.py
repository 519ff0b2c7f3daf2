"""Parallel text as a dataset: tokenisers, training pairs, evaluation sets.

Training reads the corpus, and leaves in the run's directory all that using the
run needs: the tokenisers, and the text of the evaluation sets.

    tokenizer/source.model, target.model   SentencePiece
    data/SPLIT.en, SPLIT.de                a sentence a line
"""

import functools
import hashlib
import itertools
import json
import zlib
from pathlib import Path

import numpy as np
from absl import logging

from experiments.data import links, numbers, parallel_text
from experiments.data import tokenizer as tokenizer_lib
from experiments.data.batch import PAD, UNK, Batch
from experiments.data.corpus import Corpus, Dealt, padded
from experiments.data.dataset import EvaluationSet, Rows
from experiments.data.links import Links
from experiments.data.parallel_text import ParallelText
from experiments.data.tokenizer import Tokenizer
from experiments.errors import UserError
from experiments.schema import NumbersConfig, TranslationConfig
from experiments.workdir import write_json

TOKENIZER, DATA = "tokenizer", "data"
_SIDES = ("source", "target")
# How much longer than usual an answer may be.
_LENIENCE = 1.5
# Of sources shorter than this too much is unusual.
_SHORT = 16
# Lengths of answers are multiples of this, so that few loops are compiled.
_LENGTH_STEP = 8
# A greater share of unknown tokens than this is told.
_UNKNOWN = 0.02


class Translation:
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
    corpus: Corpus | None,
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
    self, *, seed: int, size: int, unit: str, multiple: int, rows: Rows
  ) -> Dealt:
    """Returns the batches of training, by step."""
    assert self.corpus is not None
    return self.corpus.training_batches(
      seed=seed, size=size, unit=unit, multiple=multiple, rows=rows
    )

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name of `config.data.splits`."""
    folder = self._workdir / DATA
    sides = [
      list(parallel_text.lines(folder / f"{split}.{language}"))
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

  def answer_length(self, source_length: int) -> int:
    """Returns the longest answer to sources of so many tokens."""
    likely = self._length_ratio * max(source_length, _SHORT)
    length = -(-int(_LENIENCE * likely) // _LENGTH_STEP) * _LENGTH_STEP
    return min(length, self.max_length)

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns target tokens [N, T] as N texts; EOS ends each."""
    return self.target.decode(tokens)

  def links(self, source: np.ndarray, target: np.ndarray) -> Links | None:
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
      return links.of_numbers(*words)
    except ValueError:
      return None

  def source_words(self, tokens: np.ndarray) -> list[str]:
    """Names [L] source tokens for a reader."""
    return self.source.words(tokens)

  def target_words(self, tokens: np.ndarray) -> list[str]:
    """Names [L] target tokens for a reader."""
    return self.target.words(tokens)


def prepare(config: TranslationConfig, workdir: Path) -> Translation:
  """Reads a corpus for training, and leaves in the run's directory its part.

  Tokenisers and evaluation sets that a run has already are used again.

  Args:
    config: `config.data`.
    workdir: the run's directory.

  Returns:
    The dataset.

  Raises:
    UserError: if the corpus cannot be used, or is not the one the run began
      with.

  Example:
    >>> data = prepare(run.config.data, workdir)  # doctest: +SKIP
  """
  text = _read(config)
  digest = _digest(text)
  record = workdir / DATA / "corpus.json"
  if record.exists():
    if json.loads(record.read_text())["sha256"] != digest:
      raise UserError(
        "config.data.train: the text is not the one that this run began with;"
        " use another --workdir"
      )
  else:
    for split in config.splits:
      _write_text(workdir, config, split, _read(config, split))
    kept = parallel_text.without_blanks(text).text
    if not kept.source:
      raise UserError(
        f"config.data.train: of {len(text.source):,} pairs none has something"
        " on both sides"
      )
    _write_tokenizers(workdir, config, kept)
    write_json(record, {"pairs": len(text.source), "sha256": digest})
  data = load(config, workdir)
  data.corpus = Corpus(text, data.source, data.target, config)
  _warn_of_unknown(data)
  return data


def _warn_of_unknown(data: Translation) -> None:
  """Warns of tokenisers that do not know what they will meet."""
  validation = data.evaluation_set("validation").batch
  for side, tokens in zip(_SIDES, validation):
    share = (tokens == UNK).sum() / max((tokens != PAD).sum(), 1)
    if share > _UNKNOWN:
      logging.warning(
        "config.data.%s_tokenizer: %.0f%% of the validation set's tokens do not"
        " occur in training; subwords or characters would (kind=unigram, bpe"
        " or characters)",
        side,
        100 * share,
      )


def load(config: TranslationConfig, workdir: Path) -> Translation:
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
  for side in _SIDES:
    path = workdir / TOKENIZER / f"{side}.model"
    try:
      tokenizers.append(Tokenizer(path.read_bytes()))
    except OSError as error:
      raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
      raise UserError(f"{path}: {error}") from None
  source, target = tokenizers
  return Translation(config, workdir, source, target, None)


def _read(config: TranslationConfig, split: str | None = None) -> ParallelText:
  """The text of a set, or of training, from files or from numbers."""
  if isinstance(config, NumbersConfig):
    return _spelled(config, split)
  path = config.splits[split] if split else config.train
  field = f"splits.{split}" if split else "train"
  return parallel_text.read(config, path, field=f"config.data.{field}")


def _spelled(config: NumbersConfig, split: str | None) -> ParallelText:
  wanted = config.splits[split] if split else config.train
  drawn = numbers.draw(
    {None: "train", "validation": "validation"}.get(split, "test"),
    count=wanted.num_examples,
    min_digits=wanted.min_digits,
    max_digits=wanted.max_digits,
    seed=zlib.crc32(f"{config.seed} {split or 'train'}".encode()),
  )
  sides = zip(_SIDES, (config.source, config.target))
  return ParallelText(
    *(
      numbers.spelled(drawn, language, field=f"config.data.{side}")
      for side, language in sides
    )
  )


def _write_tokenizers(workdir: Path, config: TranslationConfig, text) -> None:
  if config.joint_vocabulary:
    lines = itertools.chain(*text)
    joint = tokenizer_lib.train(
      lines, config.source_tokenizer, field="config.data.source_tokenizer"
    )
    trained = [joint, joint]
  else:
    configs = (config.source_tokenizer, config.target_tokenizer)
    trained = [
      tokenizer_lib.train(lines, each, field=f"config.data.{side}_tokenizer")
      for side, each, lines in zip(_SIDES, configs, text)
    ]
  (workdir / TOKENIZER).mkdir(parents=True, exist_ok=True)
  for side, each in zip(_SIDES, trained):
    (workdir / TOKENIZER / f"{side}.model").write_bytes(each.model)


def _write_text(workdir: Path, config, split: str, text: ParallelText) -> None:
  (workdir / DATA).mkdir(parents=True, exist_ok=True)
  for language, lines in zip((config.source, config.target), text):
    path = workdir / DATA / f"{split}.{language}"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _digest(text: ParallelText) -> str:
  digest = hashlib.sha256()
  for side in text:
    digest.update("\n".join(side).encode())
    digest.update(b"\0")
  return digest.hexdigest()
