"""Hash-based dropout: uniform, independent, reproducible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.layers.dropout import Dropout, hashed

SHAPE = (256, 1024)


def kept(seed, rate=0.5, shape=SHAPE):
  rngs = {"dropout": jax.random.key(seed)}
  ones = jnp.ones(shape)
  x = Dropout(rate).apply({}, ones, deterministic=False, rngs=rngs)
  return np.asarray(x) != 0


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_rate_is_exact_and_the_mean_is_kept(rate):
  rngs = {"dropout": jax.random.key(0)}
  x = Dropout(rate).apply({}, jnp.ones(SHAPE), deterministic=False, rngs=rngs)
  deviation = (rate / (1 - rate) / np.prod(SHAPE)) ** 0.5
  assert abs(float(x.mean()) - 1) < 4 * deviation
  assert abs(kept(1, rate).mean() - (1 - rate)) < 4 * 0.5 / 512


@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (0, 1), (1, 1), (2, 7)])
def test_neighbouring_elements_are_independent(rows, columns):
  mask = 2.0 * kept(0) - 1
  moved = np.roll(mask, (rows, columns), (0, 1))
  assert abs((mask * moved).mean()) < 4 / 512


def test_rows_and_columns_are_dropped_evenly():
  mask = 2.0 * kept(0) - 1
  for axis in (0, 1):
    sums = mask.sum(axis) / mask.shape[axis] ** 0.5
    assert abs(sums.std() - 1) < 0.15
    assert np.abs(sums).max() < 5.5


@pytest.mark.parametrize("seeds", [(0, 1), (1, 2), (7, 8)])
def test_masks_of_steps_and_layers_are_independent(seeds):
  one, other = (2.0 * kept(seed) - 1 for seed in seeds)
  assert abs((one * other).mean()) < 4 / 512
  # No shift of one mask is the other.
  flat = np.fft.rfft(one.ravel()), np.fft.rfft(other.ravel())
  correlation = np.fft.irfft(flat[0] * np.conj(flat[1])) / one.size
  assert np.abs(correlation).max() < 6 / 512


def test_bits_and_words_are_uniform():
  words = np.asarray(hashed(jax.random.key(3), SHAPE)).ravel()
  for bit in range(32):
    assert abs(((words >> bit) & 1).mean() - 0.5) < 4 * 0.5 / 512, bit
  counts = np.bincount(words >> 24, minlength=256)
  chi_square = ((counts - words.size / 256) ** 2 / (words.size / 256)).sum()
  assert 160 < chi_square < 360  # 255 degrees of freedom


def test_gradient_uses_the_same_mask():
  rngs = {"dropout": jax.random.key(0)}

  def drop(x):
    return Dropout(0.3).apply({}, x, deterministic=False, rngs=rngs)

  x = jnp.ones((8, 8))
  gradient = jax.grad(lambda x: drop(x).sum())(x)
  np.testing.assert_array_equal(gradient, drop(x))


def test_dropout_is_identity_if_deterministic_or_rate_zero():
  x = jnp.ones((2, 3), jnp.bfloat16)
  assert Dropout(0.5).apply({}, x, deterministic=True) is x
  assert Dropout(0.0).apply({}, x, deterministic=False) is x
  rngs = {"dropout": jax.random.key(0)}
  assert (
    Dropout(0.5).apply({}, x, deterministic=False, rngs=rngs).dtype == x.dtype
  )


def test_too_large_shape_is_refused():
  with pytest.raises(ValueError, match=r"less than 2\^32 numbers"):
    jax.eval_shape(lambda rng: hashed(rng, (2**16, 2**16)), jax.random.key(0))
