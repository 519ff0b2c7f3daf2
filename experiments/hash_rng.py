"""Random keys that are derived by a hash of a few operations.

JAX's default generator derives a key by some hundred operations on single
numbers. A Transformer derives keys for each dropout layer in every step, which
were two fifths of the operations of its training step for TPUs.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl


def mixed(word: jax.Array, salt: jax.Array) -> jax.Array:
  """A hash of uint32 words, one-to-one for a given salt."""
  # triple32: each output bit depends nearly evenly on every input bit. See
  # C. Wellons, 2018 (https://nullprogram.com/blog/2018/07/31/).
  word = (word ^ (word >> 17)) * np.uint32(0xED5AD4BB)
  word = (word ^ (word >> 11)) * np.uint32(0xAC4C1B51)
  word = (word ^ (word >> 15) ^ salt) * np.uint32(0x31848BAB)
  return word ^ (word >> 14)


def check_size(shape: tuple[int, ...]) -> None:
  """Raises ValueError for a shape of more numbers than 32 bits can count."""
  if math.prod(shape) >= 2**32:
    raise ValueError(
      f"a shape of less than 2^32 numbers is needed, got {shape}"
    )


def hash_key(rng: jax.Array) -> jax.Array:
  """A key of this generator, which depends on the key `rng` of any other.

  `jax.random` and Flax derive further keys from it, and draw uint32 and float32
  numbers.
  """
  is_typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
  if is_typed and jax.random.key_impl(rng) == _GENERATOR:
    return rng
  data = jax.random.bits(rng, (2,), jnp.uint32)
  return jax.random.wrap_key_data(data, impl=_GENERATOR)


def _fold_in(key: jax.Array, data: jax.Array | int) -> jax.Array:
  # The roles of the words are not those in `_bits`.
  first = mixed(key[1] + jnp.asarray(data, jnp.uint32), key[0])
  return jnp.stack([first, mixed(first + np.uint32(0x9E3779B9), key[1])])


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32)
  keys = jax.vmap(_fold_in, (None, 0))(key, numbers)
  return jnp.reshape(keys, (*shape, 2))


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  if width != 32:
    raise NotImplementedError(
      f"only words of 32 bits, got {width}; draw float32 numbers and cast them"
    )
  check_size(shape)
  numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32)
  return jnp.reshape(mixed(numbers + key[0], key[1]), shape)


def _seed(seed: jax.Array) -> jax.Array:
  return _fold_in(jnp.zeros(2, jnp.uint32), seed)


_GENERATOR = define_prng_impl(
  key_shape=(2,),
  seed=_seed,
  split=_split,
  random_bits=_bits,
  fold_in=_fold_in,
  name="triple32",
  tag="t32",
)
