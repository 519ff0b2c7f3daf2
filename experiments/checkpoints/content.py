"""The content of a checkpoint: the arrays of a state, and their digests."""

from collections.abc import Mapping
from typing import Any

import jax

from experiments.checkpoints import digests
from experiments.optimization.step import TrainState

ITEMS = ("state", "batches", "digests")


def arrays(state: TrainState) -> dict[str, Any]:
  """Returns a state as a dictionary of arrays, with the rng as plain data."""
  plain = {
    "step": state.step,
    "params": state.params,
    "opt_state": state.opt_state,
    "rng": _key_data(state.rng),
  }
  return plain | ({} if state.average is None else {"average": state.average})


def digests_of(
  plain: Mapping[str, Any], batches: Mapping[str, Any]
) -> dict[str, int]:
  """Returns a digest of each array, by path, and of the data's position."""
  return {**digests.of_arrays(plain), "batches": digests.of_json(batches)}


def _key_data(rng):
  if not isinstance(rng, jax.ShapeDtypeStruct):
    return jax.random.key_data(rng)
  plain = jax.eval_shape(jax.random.key_data, rng)
  return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=rng.sharding)
