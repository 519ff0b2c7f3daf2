"""The cache, a pytree with pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import cache as caches
from tests.attention.oracle import draw


def test_appending_in_pieces_equals_writing_at_once():
  key, value = (x.astype("f4") for x in draw(0, (2, 6, 3), (2, 6, 4)))
  cache = caches.init((2,), 8, 3, 4)
  append = jax.jit(caches.append)
  for start, stop in ((0, 1), (1, 4), (4, 6)):
    cache = append(cache, key[:, start:stop], value[:, start:stop])
  assert int(cache.length) == 6
  assert cache.max_length == 8
  np.testing.assert_array_equal(cache.key[:, :6], key)
  np.testing.assert_array_equal(cache.value[:, :6], value)
  assert not cache.key[:, 6:].any()


def test_append_leaves_the_old_cache_unchanged_and_keeps_the_dtype():
  empty = caches.init((), 4, 2, dtype=jnp.bfloat16)
  full = caches.append(empty, jnp.ones((3, 2)), jnp.ones((3, 2)))
  assert int(empty.length) == 0
  assert not empty.key.any()
  assert full.key.dtype == full.value.dtype == jnp.bfloat16


def test_too_many_tokens_raise():
  cache = caches.init((), 4, 2)
  cache = caches.append(cache, jnp.ones((3, 2)), jnp.ones((3, 2)))
  with pytest.raises(ValueError, match="3 of max_length=4"):
    caches.append(cache, jnp.ones((2, 2)), jnp.ones((2, 2)))
  too_long = jax.jit(caches.append)(cache, jnp.ones((2, 2)), jnp.ones((2, 2)))
  assert int(too_long.length) > too_long.max_length
  with pytest.raises(ValueError, match="5 more"):
    jax.jit(caches.append)(cache, jnp.ones((5, 2)), jnp.ones((5, 2)))
  with pytest.raises(ValueError, match="max_length"):
    caches.init((), 0, 2)


@pytest.mark.parametrize(
  ("argument", "key", "value"),
  [
    ("key", (2, 1, 4), (2, 1, 4)),
    ("key", (3, 1, 3), (2, 1, 4)),
    ("value", (2, 1, 3), (2, 1, 3)),
    ("value", (2, 1, 3), (2, 2, 4)),
  ],
)
def test_errors_name_the_argument(argument, key, value):
  with pytest.raises(AssertionError, match=rf"\b{argument} has"):
    caches.append(caches.init((2,), 8, 3, 4), jnp.ones(key), jnp.ones(value))


def test_tokens_that_are_lists_raise_and_lengths_may_be_lists():
  empty, tokens = (
    caches.init((2,), 8, 3, length_shape=(2,)),
    jnp.ones((2, 1, 3)),
  )
  with pytest.raises(TypeError, match="key must be an array"):
    caches.append(empty, [[1.0]], tokens)
  longer = caches.append(empty, tokens, tokens, lengths=[1, 0])
  np.testing.assert_array_equal(longer.length, [1, 0])


def test_lengths_per_example_equal_separate_caches():
  key, value = (x.astype("f4") for x in draw(0, (2, 3, 6, 3), (2, 3, 6, 4)))
  cache = caches.init((2, 3), 5, 3, 4, length_shape=(2,))
  append = jax.jit(caches.append)
  cache = append(cache, key[..., :3, :], value[..., :3, :], jnp.array([3, 1]))
  cache = append(cache, key[..., 3:, :], value[..., 3:, :], jnp.array([1, 2]))
  np.testing.assert_array_equal(cache.length, [4, 3])
  for got, new in ((cache.key, key), (cache.value, value)):
    np.testing.assert_array_equal(got[0, :, :4], new[0][:, [0, 1, 2, 3]])
    np.testing.assert_array_equal(got[1, :, :3], new[1][:, [0, 3, 4]])
    assert not got[0, :, 4:].any()
    assert not got[1, :, 3:].any()
  with pytest.raises(ValueError, match="4 of max_length=5 tokens, 2 more"):
    caches.append(cache, key[..., :2, :], value[..., :2, :])
  # Under jit, tokens past the end are dropped: the others stay.
  longer = append(cache, key[..., :3, :], value[..., :3, :], jnp.array([3, 1]))
  np.testing.assert_array_equal(longer.key[0, :, :4], cache.key[0, :, :4])
  with pytest.raises(AssertionError, match="length_shape"):
    caches.append(caches.init((3,), 8, 3), key[0], key[0], jnp.array([3, 1]))
  with pytest.raises(ValueError, match="length_shape"):
    caches.init((2, 3), 5, 3, length_shape=(3,))
  empty = caches.init((2, 3), 9, 3, 4, length_shape=(2,))
  for bad in ([4, 1], [1, -1], [1.0, 2.0]):
    with pytest.raises(ValueError, match="lengths must be"):
      caches.append(empty, key[..., :3, :], value[..., :3, :], np.array(bad))


def test_a_rolling_cache_keeps_the_last_tokens():
  (tokens,) = (x.astype("f4") for x in draw(1, (9, 2)))
  cache = caches.init((), 4, 2, rolling=True)
  for start, stop in ((0, 1), (1, 3), (3, 9)):
    cache = caches.append(cache, tokens[start:stop], tokens[start:stop])
    for position in range(max(0, stop - 4), stop):
      np.testing.assert_array_equal(cache.key[position % 4], tokens[position])
  assert cache.key.shape == (4, 2)
  assert int(cache.length) == 9


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_a_rolling_cache_accepts_unsigned_lengths(dtype):
  tokens = jnp.arange(6.0).reshape(1, 3, 2)
  held = []
  for lengths in (np.array([2], dtype), np.array([2])):
    empty = caches.init((1,), 8, 2, length_shape=(1,), rolling=True)
    held.append(caches.append(empty, tokens, tokens, lengths=lengths))
  jax.tree.map(np.testing.assert_array_equal, *held)
