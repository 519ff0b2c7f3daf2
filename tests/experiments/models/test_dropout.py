"""Hash-based dropout: uniform, independent, reproducible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.hash_rng import hash_key
from experiments.models.layers.dropout import Dropout, hashed

SHAPE = (256, 1024)


def kept(rng, rate=0.5, shape=SHAPE):
  rngs = {"dropout": jax.random.key(rng) if isinstance(rng, int) else rng}
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


def _of_steps(number):
  return hash_key(jax.random.key(number))


def _of_layers(number):
  return jax.random.fold_in(_of_steps(3), number)


def _split(number):
  return jax.random.split(_of_steps(3), 9)[number]


@pytest.mark.parametrize("make", [_of_steps, _of_layers, _split])
@pytest.mark.parametrize("numbers", [(0, 1), (1, 2), (7, 8)])
def test_masks_of_steps_and_layers_are_independent(make, numbers):
  one, other = (2.0 * kept(make(number)) - 1 for number in numbers)
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


def test_derived_keys_are_uniform_and_differ():
  keys = jax.vmap(jax.random.fold_in, (None, 0))(
    hash_key(jax.random.key(0)), jnp.arange(2**16)
  )
  words = np.asarray(jax.random.key_data(keys))
  assert len(np.unique(words[:, 0])) == len(np.unique(words[:, 1])) == 2**16
  signs = ((words[..., None] >> np.arange(32)) & 1).reshape(-1, 64) * 2.0 - 1
  assert np.abs(signs.mean(0)).max() < 5 / 256
  # No bit depends on another one, nor on those of the next key.
  assert np.abs(signs.T @ signs / 2**16 - np.eye(64)).max() < 5 / 256
  assert np.abs(signs[1:].T @ signs[:-1] / 2**16).max() < 5 / 256


def test_only_words_of_32_bits_are_drawn():
  rng = hash_key(jax.random.key(0))
  assert jax.random.uniform(rng, (3,)).dtype == jnp.float32
  with pytest.raises(NotImplementedError, match="32 bits, got 16"):
    jax.random.bits(rng, (3,), jnp.uint16)


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
