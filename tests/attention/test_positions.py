"""Positions, compared with the formulas of their papers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks, positions
from attention.modules import MultiHeadAttention
from attention.positions import encodings
from tests.attention.comparison import close, jitted
from tests.attention.oracle import draw, single

attention_weights = jitted(attention.attention_weights)
rotary = jax.jit(positions.rotary, static_argnames=("base", "options"))


def test_sinusoidal_equals_the_formula():
  table = np.asarray(jax.jit(lambda: positions.sinusoidal(50, 6))())
  for position in range(50):
    for pair in range(3):
      angle = position / 10000 ** (2 * pair / 6)
      np.testing.assert_allclose(
        table[position, 2 * pair : 2 * pair + 2],
        [math.sin(angle), math.cos(angle)],
        atol=1e-6,
      )


@pytest.mark.parametrize(
  ("pairs", "places"),
  [
    ("interleaved", [(0, 1), (2, 3), (4, 5)]),
    ("half_split", [(0, 3), (1, 4), (2, 5)]),
  ],
)
def test_rotary_rotates_each_pair_of_the_first_features(pairs, places):
  (tokens,) = draw(0, (2, 7, 8))
  options = positions.RotaryOptions(100.0, rotary_dim=6, pairs=pairs)
  turned = np.asarray(rotary(tokens, options=options))
  for position in range(7):
    for pair, (real, imaginary) in enumerate(places):
      angle = position * 100.0 ** (-2 * pair / 6)
      before, after = (
        each[:, position, real] + 1j * each[:, position, imaginary]
        for each in (tokens, turned)
      )
      expected = before * complex(math.cos(angle), math.sin(angle))
      np.testing.assert_allclose(after, expected, atol=1e-5)
  np.testing.assert_array_equal(turned[..., 6:], tokens[..., 6:].astype("f4"))
  if pairs == "interleaved":
    by_default = rotary(tokens[..., :6], base=100.0)
    np.testing.assert_array_equal(by_default, turned[..., :6])


def linear(pair, size, base):
  return base ** (-2 * pair / size) / 4.0


def ntk(pair, size, base):
  return (base * 4.0 ** (size / (size - 2))) ** (-2 * pair / size)


def yarn(pair, size, base):
  frequency = base ** (-2 * pair / size)
  limits = []
  for periods in (32, 1):
    # base ** (2 index / size) * 2 pi * periods = 64
    index = math.log(64 / (2 * math.pi * periods), base) * size / 2
    limits.append(index)
  low, high = max(math.floor(limits[0]), 0), math.ceil(limits[1])
  if pair <= low:
    return frequency
  if pair >= high:
    return frequency / 4.0
  share = (pair - low) / (high - low)
  return share * frequency / 4.0 + (1 - share) * frequency


def llama3(pair, size, base):
  frequency = base ** (-2 * pair / size)
  wavelength = 2 * math.pi / frequency
  if wavelength < 64 / 4.0:
    return frequency
  if wavelength > 64 / 1.0:
    return frequency / 4.0
  smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
  return (1 - smooth) * frequency / 4.0 + smooth * frequency


SCALINGS = {
  linear: positions.LinearScaling(4.0),
  ntk: positions.NTKScaling(4.0),
  yarn: positions.YaRNScaling(4.0, original_length=64),
  llama3: positions.Llama3Scaling(4.0, original_length=64),
}


@pytest.mark.parametrize("formula", SCALINGS)
def test_scaled_frequencies_equal_the_formula(formula):
  scaling = SCALINGS[formula]
  options = positions.RotaryOptions(500.0, rotary_dim=16, scaling=scaling)
  expected = [formula(pair, 16, 500.0) for pair in range(8)]
  np.testing.assert_allclose(options.frequencies(20), expected, rtol=1e-12)


def test_yarn_multiplies_rotated_tokens():
  (tokens,) = draw(0, (5, 8))
  for given, expected in ((None, 0.1 * math.log(4.0) + 1.0), (0.5, 0.5)):
    scaling = positions.YaRNScaling(4.0, 64, attention_factor=given)
    options = positions.RotaryOptions(rotary_dim=6, scaling=scaling)
    turned = np.asarray(rotary(tokens, options=options))
    norms = np.linalg.norm(turned[:, :6], axis=-1)
    np.testing.assert_allclose(
      norms / np.linalg.norm(tokens[:, :6], axis=-1), expected, rtol=1e-5
    )
    np.testing.assert_allclose(turned[:, 6:], tokens[:, 6:], rtol=1e-6)


def test_rotated_scores_depend_on_distances_only():
  query, key = draw(1, (2, 5, 8), (2, 5, 8))
  near, far = (
    attention_weights(
      rotary(query, start + np.arange(5)), rotary(key, start + np.arange(5))
    )
    for start in (0, 40)
  )
  np.testing.assert_allclose(near, far, rtol=1e-4)
  assert abs(near - attention_weights(query, key)).max() > 1e-2


def test_positions_broadcast_and_keep_the_dtype():
  (tokens,) = draw(2, (2, 3, 5, 4))
  offsets = np.array([[0], [10]])[:, None]
  turned = rotary(tokens, offsets + np.arange(5).reshape(1, 1, 5))
  np.testing.assert_allclose(
    turned[1], rotary(tokens[1], 10 + np.arange(5)), rtol=1e-5
  )
  half = jax.eval_shape(positions.rotary, jnp.asarray(tokens, jnp.bfloat16))
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


def test_positions_between_integers_with_a_largest_length():
  options = positions.RotaryOptions(max_length=8)
  places, tokens = np.array([0.0, 0.5, 7.5]), jnp.ones((3, 4))
  np.testing.assert_allclose(
    positions.rotary(tokens, places, options=options),
    positions.rotary(tokens, places),
    rtol=1e-6,
  )


@pytest.mark.parametrize(
  ("message", "make"),
  [
    ("pairs", lambda: positions.RotaryOptions(pairs="halves")),
    ("rotary_dim must be even", lambda: positions.RotaryOptions(rotary_dim=3)),
    ("rotary_dim", lambda: positions.RotaryOptions(rotary_dim=0)),
    ("max_length", lambda: positions.RotaryOptions(max_length=0)),
    ("factor", lambda: positions.LinearScaling(0.5)),
    ("low_freq_factor", lambda: positions.Llama3Scaling(2.0, 64, 4.0, 1.0)),
  ],
)
def test_wrong_options_raise(message, make):
  with pytest.raises(ValueError, match=message):
    make()
  with pytest.raises(ValueError, match="at most"):
    positions.rotary(
      jnp.ones((3, 4)), options=positions.RotaryOptions(rotary_dim=6)
    )


@pytest.mark.parametrize("scaling", [None, positions.NTKScaling(2.0)])
def test_tables_have_the_computed_angles(scaling, monkeypatch):
  (tokens,) = single(4, (2, 9, 8))
  options = positions.RotaryOptions(100.0, rotary_dim=6, scaling=scaling)
  limited = dataclasses.replace(options, max_length=9)
  places = np.stack([np.arange(9), np.arange(9)[::-1]])
  computed = rotary(tokens, places, options=options)
  table = rotary(tokens, places, options=limited)
  np.testing.assert_allclose(table, computed, atol=1e-6)
  whole = jitted(positions.rotary)(tokens[:1], options=options)
  np.testing.assert_array_equal(whole[0], table[0])
  monkeypatch.setattr(encodings, "_MAX_TABLE_SIZE", 0)
  whole = jitted(positions.rotary)(tokens[:1], options=options)
  np.testing.assert_allclose(whole[0], table[0], atol=1e-6)


@pytest.mark.parametrize("table_size", [2**20, 0])
def test_positions_beyond_the_maximum_length_give_nan(table_size, monkeypatch):
  monkeypatch.setattr(encodings, "_MAX_TABLE_SIZE", table_size)
  options = positions.RotaryOptions(max_length=9)
  tokens, places = np.ones((4, 4), np.float32), np.array([-1, 0, 8, 9])
  turned = jitted(positions.rotary)(tokens, places, options=options)
  outside = np.isnan(turned).all(-1)
  np.testing.assert_array_equal(outside, [True, False, False, True])
  assert np.isfinite(turned[1:3]).all()


def test_positions_within_segments_equal_separate_sequences():
  (tokens,) = single(3, (2, 8, 8))
  options = positions.RotaryOptions(
    100.0, rotary_dim=2, pairs="half_split", scaling=SCALINGS[llama3]
  )
  module = MultiHeadAttention(2, num_key_value_heads=1, rotary=options)
  alone, variables = jax.jit(module.init_with_output)(
    jax.random.key(0), tokens.reshape(4, 4, 8)
  )
  ids = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])

  @jax.jit
  def packed(variables, tokens, positions):
    mask = masks.segments(ids, ids)
    return module.apply(variables, tokens, mask=mask, positions=positions)

  # Only distances within a segment matter.
  within = np.array([[0, 1, 2, 3, 0, 1, 2, 3], [9, 10, 11, 12, 5, 6, 7, 8]])
  close(
    packed(variables, tokens, within).reshape(4, 4, 8),
    alone,
    rtol=1e-4,
    atol=1e-5,
  )
  other = packed(variables, tokens, 2 * within).reshape(4, 4, 8)
  assert abs(other - alone).max() > 1e-3
  with pytest.raises(AssertionError, match=r"positions.*length=8.*key"):
    module.apply(variables, tokens[:, :5], tokens, positions=jnp.arange(5))
