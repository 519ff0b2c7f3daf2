"""Config of the data: a synthetic task, spelt numbers, or parallel text."""

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from experiments.config.sections import Section, Seed, Size

# Names become parts of file names, so path separators are not allowed.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
FilePath = Annotated[str, Field(min_length=1)]


def _check_order(section: Section, name: str) -> None:
  if getattr(section, f"min_{name}") > getattr(section, f"max_{name}"):
    raise ValueError(f"min_{name} must not be above max_{name}")


def _with_validation(splits):
  if "validation" not in splits:
    raise ValueError("splits must have a 'validation'")
  return splits


Split = TypeVar("Split")
Splits = Annotated[dict[Name, Split], AfterValidator(_with_validation)]


class LengthRange(Section):
  """An evaluation set of a synthetic task."""

  min_length: Size
  """Shortest length."""
  max_length: Size
  """Longest length."""
  num_examples: Size
  """Number of examples."""

  @model_validator(mode="after")
  def _lengths(self):
    _check_order(self, "length")
    return self


class TaskConfig(Section):
  """A synthetic task."""

  name: Literal["copy", "reverse", "lookup"] = "reverse"
  """The task."""
  symbols: Annotated[Size, Field(ge=2)] = 50
  """Number of different symbols (for lookup: of keys, and of values)."""
  min_length: Size = 1
  """Shortest length in training."""
  max_length: Size = 25
  """Longest length in training."""
  evaluation_seed: Seed = 0
  """Seed of the evaluation sets; training data does not depend on it."""
  splits: Splits[LengthRange] = Field(
    default={
      "validation": LengthRange(min_length=1, max_length=25, num_examples=256),
      "test": LengthRange(min_length=1, max_length=25, num_examples=2000),
      "test_up_to_30": LengthRange(
        min_length=1, max_length=30, num_examples=2000
      ),
      "test_26_to_30": LengthRange(
        min_length=26, max_length=30, num_examples=1000
      ),
    }
  )
  """Evaluation sets by name; "validation" is required."""

  @model_validator(mode="after")
  def _lengths(self):
    _check_order(self, "length")
    lengths = [split.max_length for split in self.splits.values()]
    longest = max(self.max_length, *lengths)
    if self.name == "lookup" and longest > self.symbols:
      raise ValueError(
        f"lookup with up to {longest} pairs needs as many distinct keys:"
        f" raise symbols from {self.symbols}"
      )
    return self


class TokenizerConfig(Section):
  """A tokenizer, trained on the training text."""

  kind: Literal["unigram", "bpe", "words", "characters"] = "unigram"
  """Subwords (unigram, bpe), words between spaces, or characters."""
  vocabulary_size: Annotated[int, Field(ge=8)] = 8000
  """Number of subwords; for words and characters, the largest number."""


class _Translation(Section):
  """The fields of parallel text, generated or in files."""

  source: Name = "en"
  """Language to translate from."""
  target: Name = "de"
  """Language to translate to."""
  source_tokenizer: TokenizerConfig = TokenizerConfig()
  """Tokenizer of the source."""
  target_tokenizer: TokenizerConfig = TokenizerConfig()
  """Tokenizer of the target."""
  joint_vocabulary: bool = True
  """Whether one tokenizer, trained on both sides, is used for both."""
  max_length: Annotated[int, Field(ge=2)] = 128
  """Longest source or target in tokens, EOS included.

  Training omits longer pairs; translation truncates longer lines.
  """
  num_shapes: Size = 14
  """Number of batch shapes, each compiled once; more shapes pad less."""
  length_multiple: Size = 1
  """Lengths of batch shapes are multiples of it; use 8 on GPUs and TPUs."""

  @model_validator(mode="after")
  def _fields_fit(self):
    if self.joint_vocabulary and self.source_tokenizer != self.target_tokenizer:
      raise ValueError(
        "joint_vocabulary needs source_tokenizer and target_tokenizer to be"
        " the same; change one, or set joint_vocabulary to False"
      )
    if self.max_length % self.length_multiple:
      raise ValueError(
        "max_length must be a multiple of length_multiple:"
        f" {self.max_length} is no multiple of {self.length_multiple}"
      )
    if self.source == self.target:
      raise ValueError(
        f"source and target are both {self.source!r}; name two languages"
      )
    return self


class DigitRange(Section):
  """A set of numbers."""

  min_digits: Size
  """Digits of the shortest numbers."""
  max_digits: Annotated[int, Field(ge=1, le=30)]
  """Digits of the longest numbers."""
  num_examples: Size
  """Number of examples."""

  @model_validator(mode="after")
  def _digits(self):
    _check_order(self, "digits")
    return self


class NumbersConfig(_Translation):
  """Integers, spelt in two of the languages of num2words."""

  name: Literal["numbers"] = "numbers"
  train: DigitRange = DigitRange(
    min_digits=1, max_digits=12, num_examples=50_000
  )
  """The training numbers."""
  splits: Splits[DigitRange] = Field(
    default={
      "validation": DigitRange(min_digits=1, max_digits=12, num_examples=1000),
      "test": DigitRange(min_digits=1, max_digits=12, num_examples=2000),
      "test_13_to_16": DigitRange(
        min_digits=13, max_digits=16, num_examples=1000
      ),
    }
  )
  """Evaluation sets by name; "validation" is required.

  Sets other than "validation" contain test numbers. The numbers of training,
  validation and test are disjoint.
  """
  seed: Seed = 0
  """Seed of the numbers."""


class TextConfig(_Translation):
  """Parallel text in files."""

  name: Literal["text"] = "text"
  format: Literal["lines", "tsv", "huggingface"] = "lines"
  """Format of the text.

  lines: PREFIX.SOURCE and PREFIX.TARGET, plain or .gz, a sentence per line.
  tsv: a file of source, tab, target. huggingface: NAME[:CONFIG]:SPLIT, or a
  folder written by `save_to_disk`.
  """
  dir: str = ""
  """Directory of the paths below; "" is the current directory."""
  train: FilePath = "train"
  """The training text."""
  splits: Splits[FilePath] = Field(
    default={"validation": "val", "test": "test"}
  )
  """Evaluation sets by name; "validation" is required."""


TranslationConfig = NumbersConfig | TextConfig
DataConfig = Annotated[
  TaskConfig | TranslationConfig, Field(discriminator="name")
]
