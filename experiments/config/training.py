"""Config of the optimizer, training, evaluation and device mesh."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from experiments.config.sections import (
  CHANGEABLE,
  AboveZero,
  AtLeastZero,
  Natural,
  Positive,
  Rate,
  Section,
  Size,
)

# Fields that an optimizer does not read.
UNUSED = {
  "sgd": ("b2", "eps", "weight_decay"),
  "adam": ("weight_decay",),
  "adamw": (),
  "adafactor": ("b1", "b2", "eps", "weight_decay"),
}


# Wider beams take more memory than most devices have.
MAX_BEAM_SIZE = 4096
# Above it, powers of the lengths of sequences overflow in float32.
MAX_LENGTH_PENALTY = 10


class OptimizerConfig(Section):
  """The optimizer and its learning-rate schedule."""

  name: Literal["sgd", "adam", "adamw", "adafactor"] = "adam"
  """The update rule."""
  learning_rate: AboveZero = 3e-3
  """Learning rate at the end of the warm-up."""
  schedule: Literal["constant", "cosine", "linear", "inverse_sqrt"] = "cosine"
  """Decay after the warm-up; cosine and linear reach 0 at train.steps."""
  warmup_steps: Natural = 100
  """Steps of linear warm-up."""
  b1: Rate = 0.9
  """Decay rate of the first moment; for sgd, the momentum."""
  b2: Rate = 0.98
  """Decay rate of the second moment."""
  eps: AboveZero = 1e-9
  """Added to the square root of the second moment."""
  weight_decay: AtLeastZero = 0.0
  """Decoupled weight decay, for adamw."""
  weight_decay_of: Literal["matrices", "all"] = "matrices"
  """Parameters that decay: matrices (no biases or norms), or all."""
  clip_norm: AboveZero | None = 1.0
  """Largest global norm of the gradient; None: no clipping."""

  @property
  def depends_on_steps(self) -> bool:
    """Whether the schedule depends on `train.steps`."""
    return self.schedule in ("cosine", "linear")

  @model_validator(mode="after")
  def _unused(self):
    for field in UNUSED[self.name]:
      value = getattr(self, field)
      default = type(self).model_fields[field].default
      if value != default:
        hint = "name 'adamw' or " if field == "weight_decay" else ""
        raise ValueError(
          f"{field} {value} has no effect under {self.name!r}; use"
          f" {hint}{default}"
        )
    return self


class TrainConfig(Section):
  """The training loop: its length, its batches, and what it keeps."""

  init_from: str = ""
  """RUN or RUN:CHECKPOINT whose parameters training starts from; "": none.

  Arrays that this model lacks, or that have another shape in it, are left out.
  Text with the same languages and tokenizer settings keeps the tokenizers.
  """
  steps: Size = 2500
  """Number of updates."""
  batch_size: Size = 32
  """Examples or tokens of an update, over all devices and accumulation."""
  batch_unit: Literal["examples", "tokens"] = "examples"
  """Unit of batch_size. Tokens: of a text batch's longer side, with padding."""
  row_multiple: Size = 8
  """A batch of tokens has a multiple of this number of rows, on any mesh."""
  accumulation: Size = 1
  """Number of parts over which the gradient of an update is accumulated."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Dtype of the computation; parameters are float32."""
  label_smoothing: Rate = 0.0
  """Probability mass that the loss spreads over all tokens."""
  non_finite: Literal["stop", "skip"] = "stop"
  """Reaction to a non-finite update: stop the run, or skip the update."""
  stall_seconds: Annotated[Positive, CHANGEABLE] = 1800
  """Seconds without a step after which a run of several processes stops.

  Evaluation and compilation must take less time.
  """
  log_every: Annotated[Positive, CHANGEABLE] = 50
  """Steps between lines of training metrics."""
  tracker: Annotated[Literal["tensorboard", "wandb"], CHANGEABLE] = (
    "tensorboard"
  )
  """Display of metrics: TensorBoard events, or Weights & Biases."""
  eval_every: Annotated[Positive, CHANGEABLE] = 500
  """Steps between evaluations of the validation set."""
  checkpoint_every: Annotated[Positive, CHANGEABLE] = 500
  """Steps between checkpoints; each evaluation saves one as well."""
  keep_last: Annotated[Positive, CHANGEABLE] = 2
  """Number of latest checkpoints to keep."""
  keep_best: Annotated[Natural, CHANGEABLE] = 1
  """Number of best checkpoints to keep in addition."""
  best_metric: Annotated[
    Literal["token_accuracy", "sequence_accuracy", "bleu", "chrf", "loss"],
    CHANGEABLE,
  ] = "sequence_accuracy"
  """Validation metric that ranks checkpoints."""
  patience: Annotated[Natural, CHANGEABLE] = 0
  """Evaluations without improvement before early stopping; 0: never."""
  ema_decay: Rate = 0.0
  """Decay of the moving average of parameters that is evaluated; 0: none."""

  @property
  def init_run(self) -> tuple[str, str | None] | None:
    """The run directory and checkpoint of `init_from`; None for none."""
    checkpoint = r"(?:last|best)(?::[1-9][0-9]*)?|[0-9]+"
    found = re.fullmatch(f"(.+?)(?::({checkpoint}))?", self.init_from)
    return (found[1], found[2]) if found else None

  @property
  def rows_field(self) -> str:
    """The field whose rows must divide over the devices."""
    return "row_multiple" if self.batch_unit == "tokens" else "batch_size"

  def saves_at(self, step: int) -> bool:
    """Whether a checkpoint is saved at a step, if no signal stops the run."""
    every = (self.checkpoint_every, self.eval_every)
    return step == self.steps or any(step % each == 0 for each in every)

  @model_validator(mode="after")
  def _accumulation(self):
    whole = self.batch_unit == "examples"
    if whole and self.batch_size % self.accumulation:
      raise ValueError(
        f"accumulation {self.accumulation} must divide batch_size"
        f" {self.batch_size}"
      )
    return self


class EvaluationConfig(Section):
  """Decoding and metrics after training."""

  checkpoint: Annotated[
    str, Field(pattern=r"^((last|best)(:[1-9][0-9]*)?|[0-9]+)$")
  ] = "last"
  """Last, best, a step; last:N and best:N average N checkpoints."""
  beam_size: Annotated[int, Field(ge=1, le=MAX_BEAM_SIZE)] = 1
  """Hypotheses of beam search; 1: greedy decoding."""
  length_penalty: Annotated[float, Field(ge=0, le=MAX_LENGTH_PENALTY)] = 1.0
  """Exponent alpha of GNMT's length normalisation."""
  bleu_tokenizer: Literal["13a", "none", "intl", "char", "zh"] = "none"
  """Tokenizer of sacreBLEU; "none" for text that is tokenised already."""
  lowercase: bool = False
  """Whether BLEU ignores case."""


class MeshConfig(Section):
  """Number of devices along each axis of the device mesh."""

  data: Annotated[int, Field(ge=-1)] = -1
  """Devices that shard the rows of a batch; -1: all remaining devices."""
  fsdp: Positive = 1
  """Devices that shard rows, and also shard parameters."""
  sequence: Positive = 1
  """Devices that shard the tokens of a row (Transformer only)."""
  tensor: Positive = 1
  """Devices that shard heads, hidden units and vocabulary (Transformer)."""

  @classmethod
  def one(cls) -> "MeshConfig":
    """A single device."""
    return cls(data=1)

  @model_validator(mode="after")
  def _not_zero(self):
    if self.data == 0:
      raise ValueError("data must be -1 (all devices) or at least 1")
    return self
