"""Positions, compared with the formulas of their papers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from attention import attention_weights, positions
from tests.attention.oracle import draw


def test_sinusoidal_equals_the_formula():
  table = np.asarray(positions.sinusoidal(50, 6))
  for position in range(50):
    for pair in range(3):
      angle = position / 10000 ** (2 * pair / 6)
      np.testing.assert_allclose(
        table[position, 2 * pair : 2 * pair + 2],
        [math.sin(angle), math.cos(angle)],
        atol=1e-6,
      )


def test_rotary_rotates_each_pair_by_its_angle():
  (tokens,) = draw(0, (2, 7, 6))
  turned = np.asarray(positions.rotary(tokens, base=100.0))
  for position in range(7):
    for pair in range(3):
      angle = position * 100.0 ** (-2 * pair / 6)
      number = complex(*[math.cos(angle), math.sin(angle)])
      before = (
        tokens[:, position, 2 * pair] + 1j * (tokens[:, position, 2 * pair + 1])
      )
      after = (
        turned[:, position, 2 * pair] + 1j * (turned[:, position, 2 * pair + 1])
      )
      np.testing.assert_allclose(after, before * number, atol=1e-5)


def test_rotated_scores_depend_on_distances_only():
  query, key = draw(1, (2, 5, 8), (2, 5, 8))
  near, far = (
    attention_weights(
      positions.rotary(query, start + jnp.arange(5)),
      positions.rotary(key, start + jnp.arange(5)),
    )
    for start in (0, 40)
  )
  np.testing.assert_allclose(near, far, rtol=1e-4)
  assert abs(near - attention_weights(query, key)).max() > 1e-2


def test_positions_broadcast_and_keep_the_dtype():
  (tokens,) = draw(2, (2, 3, 5, 4))
  offsets = jnp.array([[0], [10]])[:, None]
  turned = positions.rotary(tokens, offsets + jnp.arange(5).reshape(1, 1, 5))
  np.testing.assert_allclose(
    turned[1], positions.rotary(tokens[1], 10 + jnp.arange(5)), rtol=1e-5
  )
  half = positions.rotary(jnp.asarray(tokens, jnp.bfloat16))
  assert half.dtype == jnp.bfloat16


def test_wrong_shapes_raise():
  with pytest.raises(ValueError, match="even"):
    positions.sinusoidal(3, 5)
  with pytest.raises(ValueError, match="even"):
    positions.rotary(jnp.ones((3, 5)))
  with pytest.raises(AssertionError, match="positions"):
    positions.rotary(jnp.ones((3, 4)), jnp.arange(4))
  with pytest.raises(AssertionError, match="x"):
    positions.rotary(jnp.ones(4))
