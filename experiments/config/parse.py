"""From nested dictionaries to a typed config, or to what is wrong."""

import difflib
import typing
from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import model_validator

from experiments.config.data import DataConfig, TaskConfig
from experiments.config.model import ModelConfig
from experiments.config.sections import Section, Seed
from experiments.config.training import (
  EvaluationConfig,
  MeshConfig,
  OptimizerConfig,
  TrainConfig,
)
from experiments.errors import UserError


class Config(Section):
  """A whole run.

  Attributes:
    seed: of parameters, training data and dropout.
    data: what to learn from.
    model: what learns.
    optimizer: how it learns.
    train: for how long, and what is kept.
    evaluation: how it is judged at the end.
    mesh: on which devices.
  """

  seed: Seed
  data: DataConfig
  model: ModelConfig
  optimizer: OptimizerConfig
  train: TrainConfig
  evaluation: EvaluationConfig
  mesh: MeshConfig

  @model_validator(mode="after")
  def _together(self):
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
    if self.train.patience and not self.train.keep_best:
      raise ValueError(
        "config.train.patience stops after the best checkpoint:"
        " config.train.keep_best must be at least 1"
      )
    which, _, count = self.evaluation.checkpoint.partition(":")
    kept = self.train.keep_last if which == "last" else self.train.keep_best
    if which in ("last", "best") and int(count or 1) > kept:
      raise ValueError(
        f"config.evaluation.checkpoint {self.evaluation.checkpoint!r} needs"
        " more checkpoints than are kept: raise"
        f" config.train.keep_{which} from {kept}"
      )
    return self


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
    problems = [_describe(each) for each in error.errors()]
    raise UserError("\n".join(problems)) from None


def _describe(problem: Mapping[str, Any]) -> str:
  """One line for one problem: field, what is wrong, what would be right."""
  place = problem["loc"]
  field = ".".join(["config", *map(str, _without_tag(place))])
  if problem["type"] == "extra_forbidden":
    return f"{field}: no such field{_suggest(place)}"
  if problem["type"] == "missing":
    return f"{field}: missing"
  if problem["type"] == "union_tag_invalid":
    expected = problem["ctx"]["expected_tags"]
    return f"{field}.name: got {problem['ctx']['tag']!r}; known: {expected}"
  message = problem["msg"].removeprefix("Value error, ")
  message = message[0].lower() + message[1:]
  if not place:
    return message  # of several sections, which it names
  if isinstance(problem["input"], Mapping):
    return f"{field}: {message}"
  return f"{field}: got {problem['input']!r}; {message}"


def _without_tag(place: tuple[Any, ...]) -> tuple[Any, ...]:
  """Where a field is, without the name that told its kind of section."""
  tagged = place[:1] in (("data",), ("model",))
  return place[:1] + place[2:] if tagged else place


def _suggest(place: tuple[Any, ...]) -> str:
  """Names the known field that an unknown one was probably meant to be."""
  known = set(_fields(Config, place[:-1]))
  close = difflib.get_close_matches(str(place[-1]), known, n=1)
  return f"; did you mean {close[0]!r}?" if close else ""


def _fields(kind: Any, place: tuple[Any, ...]) -> list[str]:
  """The names of the fields that the section at a place may have."""
  if isinstance(kind, type) and issubclass(kind, Section):
    if not place:
      return list(kind.model_fields)
    if place[0] in kind.model_fields:
      return _fields(kind.model_fields[place[0]].annotation, place[1:])
    # The place names which of several kinds of section this is.
    name = kind.model_fields.get("name")
    if name and place[0] in typing.get_args(name.annotation):
      return _fields(kind, place[1:])
    return []
  kinds = typing.get_args(kind)
  if typing.get_origin(kind) is dict:
    return _fields(kinds[1], place[1:])
  return [field for each in kinds for field in _fields(each, place)]
