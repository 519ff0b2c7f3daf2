"""What to learn from: a synthetic task, spelt numbers, or parallel text."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from experiments.config.sections import (
  Positive,
  Rate,
  Section,
  Seed,
)

# Names of files are made of these, so they cannot lead out of a folder.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class LengthRange(Section):
  """The lengths and the size of an evaluation set that is drawn.

  Attributes:
    min_length: shortest length.
    max_length: longest length.
    num_examples: how many.
  """

  min_length: Positive
  max_length: Positive
  num_examples: Positive

  @model_validator(mode="after")
  def _lengths(self):
    _check_order(self)
    return self


class TaskConfig(Section):
  """A synthetic task.

  Attributes:
    name: "copy", "reverse" or "lookup".
    symbols: number of different symbols (for lookup: keys, and values).
    min_length: shortest length in training.
    max_length: longest length in training.
    evaluation_seed: fixes the evaluation sets; training never enters it.
    splits: evaluation sets by name; "validation" is the one watched during
      training, and the others are evaluated at the end.
  """

  name: Literal["copy", "reverse", "lookup"]
  symbols: Annotated[int, Field(ge=2)]
  min_length: Positive
  max_length: Positive
  evaluation_seed: Seed
  splits: dict[Name, LengthRange]

  @model_validator(mode="after")
  def _lengths(self):
    _check_order(self)
    _check_validation(self.splits)
    longest = max(
      [self.max_length, *(split.max_length for split in self.splits.values())]
    )
    if self.name == "lookup" and longest > self.symbols:
      raise ValueError(
        f"lookup with up to {longest} pairs needs that many distinct keys:"
        " raise symbols"
      )
    return self


class TokenizerConfig(Section):
  """How text becomes tokens.

  Attributes:
    kind: "unigram" or "bpe" subwords, "words" between spaces, "characters".
    vocabulary_size: of subwords exactly; of words and characters at most.
    sampling: segments training text anew in every epoch: for bpe, the share of
      merges left out (Provilkov et al., 2020, https://arxiv.org/abs/1910.13267);
      for unigram, the exponent of a segmentation's probability (Kudo, 2018,
      https://arxiv.org/abs/1804.10959). 0 for the best segmentation.
  """

  kind: Literal["unigram", "bpe", "words", "characters"]
  vocabulary_size: Annotated[int, Field(ge=8)]
  sampling: Rate

  @model_validator(mode="after")
  def _sampling(self):
    if self.sampling and self.kind not in ("unigram", "bpe"):
      raise ValueError(
        f"sampling {self.sampling} needs subwords; {self.kind} have one"
        " segmentation: use 0.0"
      )
    return self


class _Translation(Section):
  """What all parallel text has in common.

  Attributes:
    source: language to translate from.
    target: language to translate to.
    source_tokenizer: how source text becomes tokens.
    target_tokenizer: how target text becomes tokens.
    joint_vocabulary: one tokenizer, trained on both sides.
    max_length: longest source or target in tokens, EOS included; longer pairs
      are left out of training, longer lines to translate are cut.
    num_shapes: shapes of training batches, each compiled once; more of them
      are padded less.
  """

  source: Name
  target: Name
  source_tokenizer: TokenizerConfig
  target_tokenizer: TokenizerConfig
  joint_vocabulary: bool
  max_length: Annotated[int, Field(ge=2)]
  num_shapes: Positive

  @model_validator(mode="after")
  def _joint(self):
    if self.joint_vocabulary and self.source_tokenizer != self.target_tokenizer:
      raise ValueError(
        "joint_vocabulary needs source_tokenizer and target_tokenizer to be"
        " the same; change one, or set joint_vocabulary to False"
      )
    if self.source == self.target:
      raise ValueError(
        f"source and target are both {self.source!r}; name two languages"
      )
    return self


class DigitRange(Section):
  """The digits and the size of a set of numbers.

  Attributes:
    min_digits: of the shortest numbers.
    max_digits: of the longest numbers.
    num_examples: how many.
  """

  min_digits: Positive
  max_digits: Annotated[int, Field(ge=1, le=30)]
  num_examples: Positive

  @model_validator(mode="after")
  def _digits(self):
    if self.min_digits > self.max_digits:
      raise ValueError("min_digits must not be above max_digits")
    return self


class NumbersConfig(_Translation):
  """Integers, spelt in one language and in another.

  Attributes:
    name: "numbers".
    train: the numbers trained on.
    splits: evaluation sets by name; the name decides nothing: those called
      "validation" hold validation numbers, all others test numbers.
    seed: fixes which numbers are drawn.
  """

  name: Literal["numbers"]
  train: DigitRange
  splits: dict[Name, DigitRange]
  seed: Seed

  @model_validator(mode="after")
  def _sets(self):
    _check_validation(self.splits)
    return self


class TextConfig(_Translation):
  """Parallel text in files.

  Attributes:
    name: "text".
    format: "lines" for PREFIX.SOURCE and PREFIX.TARGET, plain or .gz, with a
      sentence a line; "tsv" for a file of source, tab, target; "huggingface"
      for NAME[:CONFIG]:SPLIT, or a folder written by `save_to_disk`.
    dir: where the paths below begin; "" for the current directory.
    train: the training text.
    splits: evaluation sets by name, one of them "validation".
  """

  name: Literal["text"]
  format: Literal["lines", "tsv", "huggingface"]
  dir: str
  train: Annotated[str, Field(min_length=1)]
  splits: dict[Name, Annotated[str, Field(min_length=1)]]

  @model_validator(mode="after")
  def _sets(self):
    _check_validation(self.splits)
    return self


TranslationConfig = NumbersConfig | TextConfig
DataConfig = Annotated[
  TaskConfig | NumbersConfig | TextConfig, Field(discriminator="name")
]


def _check_order(lengths) -> None:
  if lengths.min_length > lengths.max_length:
    raise ValueError("min_length must not be above max_length")


def _check_validation(splits) -> None:
  if "validation" not in splits:
    raise ValueError("splits must have a 'validation'")
