"""Stages of decoding, with a model that counts."""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.decoding.cache_growth import Stage, run_stages

STEPS = types.SimpleNamespace(carry_axis=1)


class State(NamedTuple):
  length: jax.Array
  carry: Any  # [1, B, capacity], a number for each token so far
  counts: jax.Array  # [B, 1], the tokens so far
  needed: jax.Array  # [B, 1], the tokens of the whole result


def unfinished(state):
  return (state.counts < state.needed)[:, 0]


def extend(names, state):
  is_open = state.counts < state.needed
  carry = state.carry.at[:, :, state.length].set(names[None])
  carry = jnp.where(is_open[None], carry, state.carry)
  return State(state.length + 1, carry, state.counts + is_open, state.needed)


def test_rows_of_divided_stages_keep_their_places():
  """Those that wait for a stage come first, two rows at a time."""
  names, needed = np.arange(10, 15), np.array([2, 9, 1, 16, 5])
  shapes = [(4, 5), (8, 3), (16, 2)]
  stages = [
    Stage(capacity, rows, jnp.zeros((1, rows, capacity), int))
    for capacity, rows in shapes
  ]
  carry = stages[0].carry
  state = State(jnp.int32(0), carry, 0 * needed[:, None], needed[:, None])
  got = run_stages(STEPS, stages, unfinished, extend, jnp.asarray(names), state)
  want = np.where(np.arange(16) < needed[:, None], names[:, None], 0)
  np.testing.assert_array_equal(got.carry[0], want)
  np.testing.assert_array_equal(got.counts, got.needed)
