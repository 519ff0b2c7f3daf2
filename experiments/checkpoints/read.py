"""Restores training states, or parameters alone, from checkpoints."""

import functools
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging

from experiments.checkpoints.content import (
  ITEMS,
  array_digests,
  arrays,
  digests,
)
from experiments.checkpoints.damage import (
  NONE_LEFT,
  DamagedCheckpointError,
  agreement,
  check_digests,
  set_aside,
)
from experiments.checkpoints.select import choose
from experiments.checkpoints.storage import Manager
from experiments.config import TrainConfig
from experiments.distributed.multihost import first_process_only
from experiments.errors import UserError
from experiments.optimization.step import TrainState


def restore_last(
  manager: Manager, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]] | None:
  """Restores the last intact checkpoint, if any; moves damaged ones away."""
  damaged: list[tuple[int, UserError]] = []
  for step in sorted(manager.all_steps(), reverse=True):
    try:
      restored = restore(manager, step, like)
    except DamagedCheckpointError as error:
      damaged.append((step, error))
      continue
    # Nothing is moved before an older checkpoint has been restored.
    if damaged:
      first_process_only(functools.partial(_move_away, manager, damaged))
      manager.reload()
    return restored
  if damaged:
    raise UserError(f"{damaged[0][1]} {NONE_LEFT}") from damaged[0][1]
  return None


def _move_away(manager: Manager, damaged) -> None:
  for step, error in damaged:
    moved = set_aside(manager.folder / str(step))
    logging.warning("%s It was moved to %s.", error, moved)
    logging.vlog(1, "%s", "".join(traceback.format_exception(error)))


def restore(
  manager: Manager, step: int, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]]:
  """Restores a state, sharded as `like`, and the position in the data."""
  checkpoint = manager.folder / str(step)
  with agreement(checkpoint):
    restored = _read(
      manager.readable(step),
      state=ocp.args.StandardRestore(arrays(like)),
      batches=ocp.args.JsonRestore(),
      digests=ocp.args.JsonRestore(),
    )
  state, batches = restored["state"], restored["batches"]
  with agreement(checkpoint):
    check_digests(digests(state, batches), restored["digests"])
  rng = jax.random.wrap_key_data(state["rng"])
  return TrainState(**{"average": None, **state, "rng": rng}), batches


def parameters(
  manager: Manager,
  which: str,
  like: TrainState,
  config: TrainConfig,
  *,
  state: TrainState | None = None,  # in memory, and not read again
) -> tuple[Any, str]:
  """Returns the mean parameters of checkpoints, and a description of them."""
  chosen = choose(manager, which, config)
  known = {} if state is None else {int(state.step): state.evaluated}
  total = None
  for step in chosen:
    params = known.get(step)
    if params is None:
      params = _restore_parameters(manager, step, like)
    total = params if total is None else jax.tree.map(jnp.add, total, params)
  if len(chosen) == 1:
    return total, f"step {chosen[0]}"
  # See Izmailov et al., 2018 (https://arxiv.org/abs/1803.05407).
  mean = jax.tree.map(lambda leaf: leaf / len(chosen), total)
  return mean, f"mean of {len(chosen)} steps, {min(chosen)} to {max(chosen)}"


def _restore_parameters(manager: Manager, step: int, like: TrainState) -> Any:
  """Restores the moving average of the parameters, or else the parameters."""
  name = "params" if like.average is None else "average"
  checkpoint = manager.folder / str(step)
  with agreement(checkpoint):
    wanted = {name: arrays(like)[name]}
    restored = _read(
      manager.readable(step),
      state=ocp.args.PyTreeRestore(
        wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
      ),
      digests=ocp.args.JsonRestore(),
    )
  expected = restored["digests"]
  with agreement(checkpoint):
    found = array_digests(restored["state"])
    # Orbax returns the arrays of `wanted` that the checkpoint lacks.
    saved = {each for each in expected if each.startswith(f"{name}/")}
    if saved and saved != found.keys():
      different = min(saved ^ found.keys())
      raise ValueError(f"structures do not match: {different}")
    check_digests(found, expected)
  return restored["state"][name]


def _read(checkpoint: Path, **items: ocp.args.CheckpointArgs) -> Any:
  """Reads items of a checkpoint without waiting for other processes."""
  options = ocp.CheckpointManagerOptions(read_only=True)
  # Otherwise, if one process failed to read, the others would wait forever.
  if jax.process_count() > 1:
    index = jax.process_index()
    options.multiprocessing_options = ocp.options.MultiprocessingOptions(
      primary_host=index,
      active_processes={index},
      barrier_sync_key_prefix=f"process_{index}",
    )
  with ocp.CheckpointManager(
    checkpoint.parent, options=options, item_names=ITEMS
  ) as reader:
    return reader.restore(
      int(checkpoint.name), args=ocp.args.Composite(**items)
    )
