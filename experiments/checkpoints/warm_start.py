"""Starts a training from the parameters of another run."""

import dataclasses
from typing import Any

import jax
import numpy as np
from absl import logging

from experiments.checkpoints import parameter_file
from experiments.checkpoints.restore_run import restore
from experiments.data.text.dataset import TranslationDataset
from experiments.distributed.mesh import place
from experiments.errors import UserError, naming_field
from experiments.experiment import Experiment
from experiments.optimization.step import TrainState
from experiments.run_directory import run_path

_MAX_NAMES = 6  # in a line of the log


def warm_started(experiment: Experiment) -> TrainState:
  """Returns the initial state with parameters of `config.train.init_from`."""
  state = experiment.initial_state()
  field = experiment.config.train.init_from
  name, checkpoint = experiment.config.train.init_run or ("", None)
  with naming_field(f"config.train.init_from={field}", name):
    workdir = run_path(name)
    source, params, restored = restore(workdir, checkpoint)
  found, ours = map(parameter_file.named, (params, state.params))
  left_out = _left_out(source, experiment, found, ours)
  taken = set(ours).difference(*left_out.values())
  if not taken:
    raise UserError(
      f"config.train.init_from={field}: no parameter fits this model; use the"
      " model of that run, or no init_from"
    )
  logging.info(
    "%d of %d parameter arrays are those of %s (%s)",
    len(taken),
    len(ours),
    workdir,
    restored,
  )
  for reason, names in left_out.items():
    if names:
      logging.info("not from it, because %s: %s", reason, _listed(names))
  merged = _merged(state.params, found, taken)
  average = None if state.average is None else merged
  return dataclasses.replace(state, params=merged, average=average)


def _left_out(
  source: Experiment,
  experiment: Experiment,
  found: dict[str, Any],
  ours: dict[str, Any],
) -> dict[str, list[str]]:
  """The names of the parameters that are not taken, by reason."""
  new = [name for name in ours if name not in found]
  other_shape = parameter_file.of_other_shape(found, ours)
  same = _same_tokens(source, experiment)
  tokens = [] if same else _of_vocabulary(experiment)
  return {
    "it has none of this name": new,
    "they have another shape there": other_shape,
    "its tokenizers differ": [
      name for name in tokens if name not in (*new, *other_shape)
    ],
  }


def _merged(params: Any, found: dict[str, Any], taken: set[str]) -> Any:
  """Returns parameters with the sharding of `params`."""
  names = list(parameter_file.named(params))
  leaves, structure = jax.tree.flatten(params)
  # The arrays of `found` are replicated, so each device has them whole.
  merged = [
    place(np.asarray(found[name].addressable_data(0)), leaf.sharding)
    if name in taken
    else leaf
    for name, leaf in zip(names, leaves)
  ]
  return jax.tree.unflatten(structure, merged)


def _same_tokens(source: Experiment, ours: Experiment) -> bool:
  """Whether token ids have the same meaning in two experiments."""
  if not isinstance(ours.data, TranslationDataset):
    return source.config.data.name == ours.config.data.name
  return isinstance(source.data, TranslationDataset) and all(
    getattr(source.data, side).model == getattr(ours.data, side).model
    for side in ("source", "target")
  )


def _of_vocabulary(experiment: Experiment) -> list[str]:
  """The parameters whose shape depends on the size of a vocabulary."""
  model: Any = experiment.model
  larger = model.clone(
    source_vocabulary_size=model.source_vocabulary_size + 1,
    target_vocabulary_size=model.target_vocabulary_size + 1,
  )
  shapes, others = (
    parameter_file.named(
      dataclasses.replace(experiment, model=each).abstract_state.params
    )
    for each in (model, larger)
  )
  return [name for name in shapes if shapes[name].shape != others[name].shape]


def _listed(names: list[str]) -> str:
  more = len(names) - _MAX_NAMES
  listed = ", ".join(names[:_MAX_NAMES])
  return f"{listed} and {more} more" if more > 0 else listed
