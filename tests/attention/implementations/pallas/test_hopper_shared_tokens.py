"""Gradients of tokens that heads share, in the kernels for Hopper GPUs."""

import jax.numpy as jnp
import pytest

from attention import masks, scores
from attention.implementations.pallas.hopper.block import shared_tokens
from tests.attention.implementations.pallas.hopper import (
  arrays,
  check,
  ignore_nan,
)
from tests.matrix import sampled

# A score, and the leading axes of keys and values; those of queries are (2, 3).
CASES = {
  "keys and values": (scores.scaled_dot, (2, 1), (2, 1)),
  "keys": (scores.dot, (1, 1), (2, 3)),
  "different axes": (scores.dot, (2, 1), (1, 3)),
  "location": (
    lambda: scores.location(0.3 * arrays((120, 64))[0]),
    *((2, 3), (2, 3)),
  ),
}


# With one block for all heads, or with two.
@sampled("at_once", [2, 4], default=[4])
@sampled("mask", [None, masks.causal(40)], default=[masks.causal(40)])
@sampled("name", [*CASES], default=["location"])
@ignore_nan
def test_blocks_sum_the_gradients(name, mask, at_once, monkeypatch):
  monkeypatch.setattr(shared_tokens, "AT_ONCE", at_once)
  make, of_keys, of_values = CASES[name]
  tokens = arrays((2, 3, 70, 64), (*of_keys, 100, 64), (*of_values, 100, 64))
  if mask is not None:
    tokens[0] = tokens[0].at[1, 1, 66, 3].set(jnp.nan)
  options = {"score": make(), "mask": mask}
  check(tokens, **options)


@pytest.mark.parametrize(
  ("shape", "rows", "shared", "parts"),
  [
    ((2, 3, 4), 256, (), 1),
    ((2, 1, 4), 33, (1,), 1),
    ((1, 1, 4), 8, (0, 1), 3),
    ((1, 3, 1), 1, (0, 2), 8),
  ],
)
def test_each_entry_is_computed_by_one_block(shape, rows, shared, parts):
  leading = (2, 3, 4)
  entries = shared_tokens.batch_split(leading, shape, rows)
  assert (entries.shared, entries.parts) == (shared, parts)
  found = [
    [int(entries.entry(jnp.int32(block), n)) for n in range(entries.of_block)]
    for block in range(entries.blocks)
  ]
  assert sorted(n for own in found for n in own) == [*range(24)]
  # A block's entries have the same tokens.
  places = jnp.arange(24).reshape(leading)
  for own in found:
    indices = {
      tuple(
        int(index)
        for axis, index in enumerate(jnp.argwhere(places == entry)[0])
        if axis not in shared
      )
      for entry in own
    }
    assert len(indices) == 1
