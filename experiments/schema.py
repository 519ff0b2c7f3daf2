"""The typed form of a config: every field, its type and its range.

`configs/*.py` return a `ConfigDict`; `parse` turns it into these frozen
values, or says in one message what is wrong with which field. Nothing below
`loop.py` sees a `ConfigDict`.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, model_validator

from experiments.errors import UserError

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Rate = Annotated[float, Field(ge=0, lt=1)]
ScoreName = Literal[
  "dot", "scaled_dot", "general", "additive", "concat", "cosine"
]


AttentionName = Literal["none", ScoreName]


class _Section(pydantic.BaseModel):
  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, frozen=True, allow_inf_nan=False
  )


class SplitConfig(_Section):
  """One evaluation set of a synthetic task.

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
    if self.min_length > self.max_length:
      raise ValueError("min_length must not be above max_length")
    return self


class DataConfig(_Section):
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
  splits: dict[str, SplitConfig]

  @model_validator(mode="after")
  def _lengths(self):
    if self.min_length > self.max_length:
      raise ValueError("min_length must not be above max_length")
    if "validation" not in self.splits:
      raise ValueError("splits must have a 'validation'")
    longest = max(
      [self.max_length, *(split.max_length for split in self.splits.values())]
    )
    if self.name == "lookup" and longest > self.symbols:
      raise ValueError(
        f"lookup with up to {longest} pairs needs that many distinct keys:"
        " raise symbols"
      )
    return self


class Seq2SeqConfig(_Section):
  """An RNN encoder-decoder; see `models.seq2seq.Seq2Seq` for the fields."""

  name: Literal["seq2seq"]
  embedding_size: Positive
  hidden_size: Positive
  cell: Literal["gru", "lstm"]
  encoder_layers: Positive
  decoder_layers: Positive
  bidirectional: bool
  attention: AttentionName
  attention_size: Positive
  order: Literal["bahdanau", "luong"]
  query: Literal["output", "state"]
  readout: Literal["tanh", "linear"]
  input_feeding: bool
  dropout_rate: Rate

  @model_validator(mode="after")
  def _sizes(self):
    if self.bidirectional and self.hidden_size % 2:
      raise ValueError(
        "hidden_size must be even: a bidirectional encoder gives half of it"
        " to each direction"
      )
    states = self.decoder_layers * (2 if self.cell == "lstm" else 1)
    if (
      self.query == "state"
      and states > 1
      and self.attention in ("dot", "scaled_dot", "cosine")
    ):
      raise ValueError(
        f"attention {self.attention!r} compares vectors of equal size, but"
        f" query 'state' is {states} times hidden_size; use query 'output', or"
        " general, additive or concat"
      )
    return self


class TransformerConfig(_Section):
  """A Transformer; see `models.transformer.Transformer` for the fields."""

  name: Literal["transformer"]
  model_size: Positive
  feed_forward_size: Positive
  num_heads: Positive
  encoder_layers: Positive
  decoder_layers: Positive
  score: ScoreName
  norm: Literal["pre", "post"]
  positions: Literal["sinusoidal", "learned", "rotary", "none"]
  tied_embeddings: bool
  dropout_rate: Rate

  @model_validator(mode="after")
  def _heads(self):
    if self.model_size % self.num_heads:
      raise ValueError(
        f"num_heads {self.num_heads} must divide model_size {self.model_size}"
      )
    if self.positions == "rotary" and (self.model_size // self.num_heads) % 2:
      raise ValueError("rotary positions need an even size of a head")
    return self


ModelConfig = Annotated[
  Seq2SeqConfig | TransformerConfig, Field(discriminator="name")
]


class OptimizerConfig(_Section):
  """The optimiser and its schedule.

  Attributes:
    name: the rule.
    learning_rate: at the end of the warm-up.
    schedule: how it falls from there; cosine and linear end at 0.
    warmup_steps: steps of linear warm-up.
    b1: decay of the first moment (sgd: momentum).
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled, for adamw.
    clip_norm: gradients are scaled down to this global norm, or None.
  """

  name: Literal["sgd", "adam", "adamw", "adafactor"]
  learning_rate: Annotated[float, Field(gt=0)]
  schedule: Literal["constant", "cosine", "linear", "inverse_sqrt"]
  warmup_steps: Natural
  b1: Rate
  b2: Rate
  eps: Annotated[float, Field(gt=0)]
  weight_decay: Annotated[float, Field(ge=0)]
  clip_norm: Annotated[float, Field(gt=0)] | None

  @model_validator(mode="after")
  def _decay(self):
    if self.weight_decay and self.name != "adamw":
      raise ValueError(
        f"weight_decay {self.weight_decay} does nothing under {self.name!r};"
        " use name 'adamw', or 0.0"
      )
    return self


class TrainConfig(_Section):
  """The training loop.

  Attributes:
    steps: number of updates.
    batch_size: examples of an update, over all devices and accumulation.
    accumulation: an update's gradient is summed over this many parts.
    dtype: of the computation; parameters are float32.
    label_smoothing: from 0 to 1.
    log_every: steps between lines of metrics.
    eval_every: steps between looks at the validation set.
    checkpoint_every: steps between checkpoints.
    keep_last: number of last checkpoints kept.
    keep_best: number of best ones kept besides.
    best_metric: of the validation set, decides which is best.
  """

  steps: Positive
  batch_size: Positive
  accumulation: Positive
  dtype: Literal["float32", "bfloat16"]
  label_smoothing: Rate
  log_every: Positive
  eval_every: Positive
  checkpoint_every: Positive
  keep_last: Positive
  keep_best: Natural
  best_metric: Literal["token_accuracy", "sequence_accuracy", "bleu", "loss"]

  @model_validator(mode="after")
  def _parts(self):
    if self.batch_size % self.accumulation:
      raise ValueError(
        f"accumulation {self.accumulation} must divide batch_size"
        f" {self.batch_size}"
      )
    return self


class MeshConfig(_Section):
  """The device mesh.

  Attributes:
    data: devices that share a batch, -1 for all that are there.
  """

  data: Annotated[int, Field(ge=-1)]

  @model_validator(mode="after")
  def _not_zero(self):
    if self.data == 0:
      raise ValueError("data must be -1 (all devices) or at least 1")
    return self


class Config(_Section):
  """A whole run.

  Attributes:
    seed: of parameters, training data and dropout.
    data: what to learn from.
    model: what learns.
    optimizer: how it learns.
    train: for how long, and what is kept.
    mesh: on which devices.
  """

  seed: Seed
  data: DataConfig
  model: ModelConfig
  optimizer: OptimizerConfig
  train: TrainConfig
  mesh: MeshConfig


def parse(raw: Mapping[str, Any]) -> Config:
  """Checks a config and gives it its types.

  Args:
    raw: nested dictionaries, as `ConfigDict.to_dict` or JSON give them.

  Returns:
    The typed config.

  Raises:
    UserError: naming every field that is missing, unknown, of the wrong type
      or out of range, and what would be right.

  Example:
    >>> parse({"seed": -1})
    Traceback (most recent call last):
    experiments.errors.UserError: ...config.seed: ...
  """
  try:
    return Config.model_validate(raw)
  except pydantic.ValidationError as error:
    problems = [_describe(each, raw) for each in error.errors()]
    raise UserError("\n".join(problems)) from None


def _describe(problem: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
  """One line for one problem: field, what is wrong, what would be right."""
  path = [part for part in problem["loc"] if part not in _MODELS]
  field = ".".join(["config", *map(str, path)])
  if problem["type"] == "extra_forbidden":
    return f"{field}: no such field{_suggest(problem['loc'], raw)}"
  if problem["type"] == "missing":
    return f"{field}: missing"
  if problem["type"] == "union_tag_invalid":
    expected = problem["ctx"]["expected_tags"]
    return f"{field}.name: got {problem['ctx']['tag']!r}; known: {expected}"
  message = problem["msg"].removeprefix("Value error, ")
  message = message[0].lower() + message[1:]
  if isinstance(problem["input"], Mapping):
    return f"{field}: {message}"
  return f"{field}: got {problem['input']!r}; {message}"


_MODELS: dict[str, type[_Section]] = {
  "seq2seq": Seq2SeqConfig,
  "transformer": TransformerConfig,
}


def _suggest(place: tuple[Any, ...], raw: Mapping[str, Any]) -> str:
  """Names the known field that an unknown one was probably meant to be."""
  section: Any = Config
  for part in place[:-1]:
    if part in _MODELS:
      section = _MODELS[part]
    elif isinstance(section, type) and issubclass(section, _Section):
      section = section.model_fields[part].annotation
    else:
      section = SplitConfig
  known = list(getattr(section, "model_fields", ()))
  close = difflib.get_close_matches(str(place[-1]), known, n=1)
  return f"; did you mean {close[0]!r}?" if close else ""
