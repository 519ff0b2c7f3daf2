"""What a user calls to make a mask."""

import operator

import chex
import jax
import jax.numpy as jnp

from attention.masks.types import Band, Below, Mask, Segments

_FARTHEST = 2**31 - 1


def _integers(name: str, number):
  """A Python integer as it is, anything else as an integer array."""
  if isinstance(number, jax.Array):
    chex.assert_type(number, int, custom_message=f"{name} must hold integers")
    # Positions have 32 bits, and distances a sign.
    return number.astype(jnp.int32)
  if jnp.ndim(number) == 0:
    # Farther than the farthest is as far.
    return max(-_FARTHEST, min(operator.index(number), _FARTHEST))
  return _integers(name, jnp.asarray(number))


def causal(offset: int | jax.Array = 0) -> Mask:
  """Query i sees key j if j <= i + offset.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.2.3
  (https://arxiv.org/abs/1706.03762).

  Args:
    offset: the position of the first query, counted in keys; an integer, or
      an array [...] for leading axes. It may be traced.

  Returns:
    A mask.

  Example:
    >>> causal().materialize(2, 3)
    Array([[ True, False, False],
           [ True,  True, False]], dtype=bool)
  """
  return Band(None, _integers("offset", offset))


def padding(key_lengths: int | jax.Array) -> Mask:
  """Every query sees the first `key_lengths` keys of its batch entry.

  Args:
    key_lengths: int [B], or more of the leading axes, or one integer.

  Returns:
    A mask.

  Example:
    >>> import jax.numpy as jnp
    >>> padding(jnp.array([1, 2])).materialize(1, 3)
    Array([[[ True, False, False]],
           [[ True,  True, False]]], dtype=bool)
  """
  return Below(_integers("key_lengths", key_lengths))


def sliding_window(
  left: int | jax.Array | None, right: int | jax.Array | None
) -> Mask:
  """Query i sees the keys from i - left to i + right.

  See "Longformer", Beltagy et al., 2020, section 3.1
  (https://arxiv.org/abs/2004.05150).

  Args:
    left: how many keys before its own position a query sees; None for all.
    right: how many after it; None for all, 0 for a causal window.

  Returns:
    A mask.

  Example:
    >>> sliding_window(1, 0).materialize(3, 3)
    Array([[ True, False, False],
           [ True,  True, False],
           [False,  True,  True]], dtype=bool)
  """
  return Band(
    None if left is None else _integers("left", left),
    None if right is None else _integers("right", right),
  )


def segments(query_ids: jax.Array, key_ids: jax.Array) -> Mask:
  """A query sees the keys of its own segment: several texts in one row.

  Args:
    query_ids: int [..., T], the number of each query's segment.
    key_ids: int [..., S]; leading axes line up with the scores' leftmost.

  Returns:
    A mask.

  Raises:
    AssertionError: if the numbers are not integers.

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([0, 0, 1])
    >>> segments(ids, ids).materialize(3, 3)
    Array([[ True,  True, False],
           [ True,  True, False],
           [False, False,  True]], dtype=bool)
  """
  query_ids, key_ids = jnp.asarray(query_ids), jnp.asarray(key_ids)
  chex.assert_type(query_ids, int, custom_message="query_ids must be integers")
  chex.assert_type(key_ids, int, custom_message="key_ids must be integers")
  return Segments(query_ids, key_ids)


def prefix(length: int | jax.Array) -> Mask:
  """Every query sees the keys at positions before `length`.

  Joined with a causal mask it is the prefix language model of "Exploring the
  Limits of Transfer Learning with a Unified Text-to-Text Transformer", Raffel
  et al., 2019, section 3.2.1 (https://arxiv.org/abs/1910.10683).

  Args:
    length: an integer, or int [B] (or more of the leading axes).

  Returns:
    A mask.

  Example:
    >>> (causal() | prefix(2)).materialize(3, 3)
    Array([[ True,  True, False],
           [ True,  True, False],
           [ True,  True,  True]], dtype=bool)
  """
  return Below(_integers("length", length))
