"""What a checkpoint holds: the arrays of a state, and their digests."""

from collections.abc import Mapping
from typing import Any

import jax

from experiments.checkpoints import digests
from experiments.optimization.step import TrainState

ITEMS = ("state", "batches", "digests")


def arrays(state: TrainState) -> dict[str, Any]:
  """Returns a state as a dictionary of arrays; Orbax has no type for keys.

  Args:
    state: real or abstract.

  Returns:
    By the field's name; the average only where there is one.

  Example:
    >>> sorted(arrays(state))  # doctest: +SKIP
    ['opt_state', 'params', 'rng', 'step']
  """
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
  """Returns what tells a whole checkpoint from one whose bytes have changed.

  Args:
    plain: from `arrays`.
    batches: the position of the data iterator.

  Returns:
    A digest of each array, by path, and of the position.

  Example:
    >>> digests_of({"step": jax.numpy.array(3)}, {})
    {'step': 3, 'batches': ...}
  """
  return {**digests.of_arrays(plain), "batches": digests.of_json(batches)}


def _key_data(rng):
  if not isinstance(rng, jax.ShapeDtypeStruct):
    return jax.random.key_data(rng)
  plain = jax.eval_shape(jax.random.key_data, rng)
  return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=rng.sharding)
