"""The whole config, and its conversion from nested dictionaries."""

import itertools
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ValidationInfo, model_validator

from experiments.config.data import DataConfig, TaskConfig
from experiments.config.model import MODELS, ModelConfig, Seq2SeqConfig
from experiments.config.sections import CHANGEABLE, Section, Seed
from experiments.config.training import (
  EvaluationConfig,
  MeshConfig,
  OptimizerConfig,
  TrainConfig,
)
from experiments.config.unknown_field import no_such_field
from experiments.config.version import VERSION, migrated
from experiments.errors import UserError, suggestion

# Normalizers whose results over disjoint sets of keys can be merged.
_MERGEABLE = ("softmax", "softmax_sink", "sigmoid")


class Config(Section):
  """The config of an experiment."""

  version: Literal[VERSION] = VERSION  # type: ignore[valid-type]
  """Version of the schema."""
  seed: Seed = 0
  """Seed of parameters, training data and dropout."""
  data: DataConfig
  model: ModelConfig
  optimizer: OptimizerConfig
  train: TrainConfig
  evaluation: Annotated[EvaluationConfig, CHANGEABLE]
  mesh: Annotated[MeshConfig, CHANGEABLE]

  @property
  def title(self) -> str:
    """The task and the model, as "reverse: seq2seq (additive)"."""
    model = self.model
    score = model.attention if isinstance(model, Seq2SeqConfig) else model.score
    return f"{self.data.name}: {model.name} ({score})"

  @model_validator(mode="after")
  def _task(self):
    if isinstance(self.data, TaskConfig):
      if self.train.batch_unit == "tokens":
        raise ValueError(
          "config.train.batch_unit 'tokens' is for text;"
          f" {self.data.name} needs 'examples'"
        )
      if self.train.best_metric == "chrf":
        raise ValueError(
          "config.train.best_metric 'chrf' is for text; use"
          " 'sequence_accuracy', 'token_accuracy', 'bleu' or 'loss'"
        )
    return self

  @model_validator(mode="after")
  def _mesh(self):
    model = self.model
    if isinstance(model, Seq2SeqConfig):
      for axis in ("sequence", "tensor"):
        if getattr(self.mesh, axis) > 1:
          raise ValueError(
            f"config.mesh.{axis}: {getattr(self.mesh, axis)}, but a recurrent"
            " model processes a sequence on one device; use 1, and split the"
            " batch over config.mesh.data or config.mesh.fsdp"
          )
    elif model.num_heads % self.mesh.tensor:
      raise ValueError(
        f"config.mesh.tensor: {model.num_heads} heads (config.model.num_heads)"
        f" do not divide over {self.mesh.tensor} devices"
      )
    elif self.mesh.sequence > 1 and model.has_forget_gates:
      field = "forget_gate" if model.forget_gate else "score 'forgetting'"
      raise ValueError(
        f"config.mesh.sequence: {self.mesh.sequence}, but"
        f" config.model.{field} sums over all tokens on one device; use 1"
      )
    elif self.mesh.sequence > 1 and model.normalizer not in _MERGEABLE:
      raise ValueError(
        f"config.mesh.sequence: {self.mesh.sequence}, but the normalizer"
        f" {model.normalizer!r} needs all keys of a query on one device; use 1,"
        f" or as config.model.normalizer one of {', '.join(_MERGEABLE)}"
      )
    return self

  @model_validator(mode="after")
  def _checkpoints(self, info: ValidationInfo):
    if (info.context or {}).get("stored"):
      return self
    if self.train.patience and not self.train.keep_best:
      raise ValueError(
        "config.train.patience compares with the best checkpoint:"
        " config.train.keep_best must be at least 1"
      )
    _check_checkpoint(self.evaluation.checkpoint, self.train)
    return self


def parse(raw: Mapping[str, Any]) -> Config:
  """Converts a config to its typed form.

  Args:
    raw: nested dictionaries, as from `ConfigDict.to_dict`.

  Returns:
    The typed config.

  Raises:
    UserError: with a line for each field that is missing, unknown, of the wrong
      type or out of range: its name, its value and what is allowed.

  Example:
    >>> from configs import base
    >>> parse(base.get_config().to_dict() | {"seed": -1})
    Traceback (most recent call last):
    experiments.errors.UserError: config.seed: got -1; input should be ...
  """
  config = _validated({"version": VERSION, **raw})
  if missing := _missing(config):
    raise UserError("\n".join(f"{field}: missing" for field in missing))
  return config


def parse_stored(raw: Mapping[str, Any]) -> Config:
  """Converts the content of config.json, of this or an older schema version."""
  # A user can change an `evaluation.checkpoint` that the run does not keep.
  return _validated(migrated(raw), stored=True)


def changeable_fields() -> set[str]:
  """The sections and fields that may be changed on an existing run."""
  fields = set()
  for name, field in Config.model_fields.items():
    if CHANGEABLE in field.metadata:
      fields.add(name)
    # A section, or a union of sections.
    for section in typing.get_args(field.annotation) or (field.annotation,):
      if isinstance(section, type(Section)):
        fields |= {
          f"{name}.{inner}"
          for inner, each in section.model_fields.items()
          if CHANGEABLE in each.metadata
        }
  return fields


def _check_checkpoint(checkpoint: str, train: TrainConfig) -> None:
  """Checks that the checkpoint to evaluate can exist after training."""
  which, _, count = checkpoint.partition(":")
  if which in ("last", "best"):
    kept = train.keep_last if which == "last" else train.keep_best
    if int(count or 1) > kept:
      raise ValueError(
        f"config.evaluation.checkpoint {checkpoint!r} needs more checkpoints"
        f" than are kept: raise config.train.keep_{which} from {kept}"
      )
    return
  step = int(which)
  saved = filter(train.saves_at, range(train.steps, 0, -1))
  last = list(itertools.islice(saved, train.keep_last))
  # Patience may end training early; any evaluation may be the best.
  evaluated = step % train.eval_every == 0 and train.keep_best
  kept = train.saves_at(step) and (train.patience or evaluated)
  if step not in last and not (kept and 0 < step <= train.steps):
    raise ValueError(
      f"config.evaluation.checkpoint: got {checkpoint!r}; a run of"
      f" {train.steps} steps does not keep this checkpoint; use 'last', 'best',"
      f" {' or '.join(map(str, sorted(last[:2])))}, or change"
      " checkpoint_every or keep_last of config.train"
    )


def _validated(raw: Mapping[str, Any], *, stored: bool = False) -> Config:
  try:
    return Config.model_validate(raw, context={"stored": stored})
  except pydantic.ValidationError as error:
    if _has_fields_of_another_model(raw.get("model")):
      raise UserError(
        f"config.model.name: got {raw['model']['name']!r}, but the other fields"
        " are those of another model; the argument of a config sets them all:"
        " configs/reverse.py:transformer, configs/reverse.py:dot"
      ) from None
    problems = [_describe(each, raw) for each in error.errors()]
    raise UserError("\n".join(problems)) from None


def _has_fields_of_another_model(model: Any) -> bool:
  """Whether only the name of the config's model was changed."""
  names = {section.model_fields["name"].default for section in MODELS}
  return isinstance(model, Mapping) and any(
    model.keys() == section.model_fields.keys()
    and model["name"] in names - {section.model_fields["name"].default}
    for section in MODELS
  )


def _missing(section: Section, path: str = "config") -> list[str]:
  """The fields for which a default was used."""
  missing = []
  for name in type(section).model_fields:
    value = getattr(section, name)
    if name not in section.model_fields_set:
      missing.append(f"{path}.{name}")
    elif isinstance(value, Section):
      missing += _missing(value, f"{path}.{name}")
  return missing


def _describe(problem: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
  """Formats an error of pydantic as a line with the field and its value."""
  place = problem["loc"]
  if place[:1] in (("data",), ("model",)):
    place = place[:1] + place[2:]  # without the tag of a union
  field = ".".join(["config", *map(str, place)])
  if problem["type"] == "extra_forbidden":
    *parents, name = place
    section: Any = raw
    for parent in parents:
      section = section[parent]
    return no_such_field(field, set(section) - {name})
  if problem["type"] in ("missing", "union_tag_not_found"):
    return f"{field}: missing"
  if problem["type"] == "union_tag_invalid":
    expected = problem["ctx"]["expected_tags"]
    return f"{field}.name: got {problem['ctx']['tag']!r}; known: {expected}"
  message = problem["msg"].removeprefix("Value error, ")
  message = message[0].lower() + message[1:]
  if not place:
    return message  # which names its fields
  if isinstance(problem["input"], Mapping):
    return f"{field}: {message}"
  if problem["type"] == "literal_error":
    known = re.findall(r"'([^']+)'", problem["ctx"]["expected"])
    message += suggestion(str(problem["input"]), known)
  return f"{field}: got {problem['input']!r}; {message}"
