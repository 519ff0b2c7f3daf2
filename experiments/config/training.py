"""How a run learns, for how long, on which devices, and how it is judged."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from experiments.config.sections import (
  AboveZero,
  AtLeastZero,
  Natural,
  Positive,
  Rate,
  Section,
)


class OptimizerConfig(Section):
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
  learning_rate: AboveZero
  schedule: Literal["constant", "cosine", "linear", "inverse_sqrt"]
  warmup_steps: Natural
  b1: Rate
  b2: Rate
  eps: AboveZero
  weight_decay: AtLeastZero
  clip_norm: AboveZero | None

  @model_validator(mode="after")
  def _decay(self):
    if self.weight_decay and self.name != "adamw":
      raise ValueError(
        f"weight_decay {self.weight_decay} does nothing under {self.name!r};"
        " use name 'adamw', or 0.0"
      )
    return self


class TrainConfig(Section):
  """The training loop.

  Attributes:
    steps: number of updates.
    batch_size: of an update, over all devices and accumulation.
    batch_unit: what it counts: "examples", or "tokens" of the longer side of
      a batch of text, padding included.
    row_multiple: of which batches of a number of tokens have a multiple of
      rows, so that they are the same whatever devices and accumulation share
      them.
    accumulation: an update's gradient is summed over this many parts.
    dtype: of the computation; parameters are float32.
    label_smoothing: from 0 to 1.
    non_finite: what to do at a step whose loss, gradient or parameters are not
      finite: "stop" the run, or "skip" the update, which is counted.
    stall_seconds: of several processes, all stop once none has got to another
      step for so long; evaluations and compilations have to be faster.
    log_every: steps between lines of metrics.
    eval_every: steps between looks at the validation set.
    checkpoint_every: steps between checkpoints.
    keep_last: number of last checkpoints kept.
    keep_best: number of best ones kept besides.
    best_metric: of the validation set, decides which is best.
    patience: stops early after this many looks at the validation set without
      a better best_metric; 0 never does.
    ema_decay: what is evaluated is a moving average of the parameters, which
      keeps this share of itself at every step; 0 for the parameters as they
      are.
  """

  steps: Positive
  batch_size: Positive
  batch_unit: Literal["examples", "tokens"]
  row_multiple: Positive
  accumulation: Positive
  dtype: Literal["float32", "bfloat16"]
  label_smoothing: Rate
  non_finite: Literal["stop", "skip"]
  stall_seconds: Positive
  log_every: Positive
  eval_every: Positive
  checkpoint_every: Positive
  keep_last: Positive
  keep_best: Natural
  best_metric: Literal[
    "token_accuracy", "sequence_accuracy", "bleu", "chrf", "loss"
  ]
  patience: Natural
  ema_decay: Rate

  @model_validator(mode="after")
  def _parts(self):
    whole = self.batch_unit == "examples"
    if whole and self.batch_size % self.accumulation:
      raise ValueError(
        f"accumulation {self.accumulation} must divide batch_size"
        f" {self.batch_size}"
      )
    return self


class MeshConfig(Section):
  """The device mesh.

  Attributes:
    data: devices that share the rows of a batch; -1 for all that the other
      axes leave.
    fsdp: devices that share rows too, and parameters with them.
    sequence: devices that share the tokens of a row (Transformer).
    tensor: devices that share heads, hidden units and vocabulary (Transformer).
  """

  data: Annotated[int, Field(ge=-1)]
  fsdp: Positive
  sequence: Positive
  tensor: Positive

  @classmethod
  def one(cls) -> "MeshConfig":
    """A single device."""
    return cls(data=1, fsdp=1, sequence=1, tensor=1)

  @classmethod
  def data_parallel(cls) -> "MeshConfig":
    """All devices, which share rows alone."""
    return cls(data=-1, fsdp=1, sequence=1, tensor=1)

  @model_validator(mode="after")
  def _not_zero(self):
    if self.data == 0:
      raise ValueError("data must be -1 (all devices) or at least 1")
    return self


class EvaluationConfig(Section):
  """How a run answers and is judged once it is trained.

  Attributes:
    checkpoint: "last", "best" or a step; "last:10" is the mean of the last 10
      checkpoints, or as many as there are, "best:5" that of the best 5.
    beam_size: hypotheses kept while searching; 1 is greedy.
    length_penalty: the exponent alpha of GNMT's length normalisation.
    bleu_tokenizer: of sacreBLEU; "none" where text is tokenised already.
    lowercase: whether BLEU ignores case.
  """

  checkpoint: Annotated[
    str, Field(pattern=r"^((last|best)(:[1-9][0-9]*)?|[0-9]+)$")
  ]
  beam_size: Positive
  length_penalty: AtLeastZero
  bleu_tokenizer: Literal["13a", "none", "intl", "char", "zh"]
  lowercase: bool
