"""Functions that return masks."""

from collections.abc import Callable
from typing import Annotated as Shaped

import jax
import jax.numpy as jnp
import numpy as np

from attention.checks import check_integers
from attention.masks.types import Band, Below, Mask, Segments, Where
from attention.transforms.function_pytree import check_takes

_FARTHEST = 2**31 - 1


def _integers(name: str, number):
  """A Python integer in the range of int32, or an int32 array."""
  if isinstance(number, jax.Array):
    _check_integers(name, number)
    # Distances between positions are signed and have 32 bits.
    return number.astype(jnp.int32)
  if not isinstance(number, list | tuple) and np.ndim(number) == 0:
    number = number[()] if isinstance(number, np.ndarray) else number
    check_integers(**{name: number})
    # All larger offsets have the same effect.
    return max(-_FARTHEST, min(int(number), _FARTHEST))
  return _integers(name, jnp.asarray(number))


def _check_integers(name: str, array: jax.Array) -> None:
  """Raises AssertionError unless an array holds integers."""
  if jnp.issubdtype(array.dtype, jnp.integer):
    return
  hint = ""
  if array.dtype == bool:
    hint = "; a boolean array [..., T, S] is itself a mask"
  raise AssertionError(f"{name} must hold integers, got {array.dtype}{hint}")


def causal(offset: int | Shaped[jax.Array, "B"] = 0) -> Mask:
  """Query i may attend to key j if j <= i + offset.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.2.3
  (https://arxiv.org/abs/1706.03762).

  Args:
    offset: the position of the first query among the keys; an integer, or an
      array over leading axes, of which the first is the batch: [B], or [1, H]
      for one per head. It may be traced.

  Returns:
    A mask.

  Example:
    >>> causal().materialize(2, 3)
    Array([[ True, False, False],
           [ True,  True, False]], dtype=bool)
  """
  return Band(None, _integers("offset", offset))


def padding(key_lengths: int | Shaped[jax.Array, "B"]) -> Mask:
  """Every query may attend to the first `key_lengths` keys of its example.

  Args:
    key_lengths: int [B] or [B, ...], one per example, or one integer.

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
  left: int | Shaped[jax.Array, "B"] | None,
  right: int | Shaped[jax.Array, "B"] | None,
) -> Mask:
  """Query i may attend to the keys from i - left to i + right.

  See "Longformer", Beltagy et al., 2020, section 3.1
  (https://arxiv.org/abs/2004.05150).

  Args:
    left: the number of keys before its own position; None means all. Arrays
      are over leading axes, of which the first is the batch: [B]; use [1, H]
      for one per head.
    right: the number of keys after its own position; None means all, 0 makes a
      causal window.

  Returns:
    A mask.

  Raises:
    ValueError: if `left` and `right` are numbers that hide all keys.

  Example:
    >>> sliding_window(1, 0).materialize(3, 3)
    Array([[ True, False, False],
           [ True,  True, False],
           [False,  True,  True]], dtype=bool)
  """
  left = None if left is None else _integers("left", left)
  right = None if right is None else _integers("right", right)
  if isinstance(left, int) and isinstance(right, int) and left + right < 0:
    raise ValueError(
      f"left + right must be at least 0, got left={left} and right={right}, "
      "which hide all keys"
    )
  return Band(left, right)


def segments(
  query_ids: Shaped[jax.Array, "... T"], key_ids: Shaped[jax.Array, "... S"]
) -> Mask:
  """A query may attend to the keys of its own segment.

  Segments are, for instance, several texts packed into one sequence. Blockwise
  attention skips tiles whose ranges of ids have nothing in common, also if the
  ids are traced.

  Args:
    query_ids: int [..., T], the segment of each query.
    key_ids: int [..., S], the segment of each key; leading axes align with
      the leftmost axes of the scores.

  Returns:
    A mask.

  Raises:
    AssertionError: if the ids are not integers, or have no axis of tokens.

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([0, 0, 1])
    >>> segments(ids, ids).materialize(3, 3)
    Array([[ True,  True, False],
           [ True,  True, False],
           [False, False,  True]], dtype=bool)
  """
  query_ids, key_ids = jnp.asarray(query_ids), jnp.asarray(key_ids)
  for name, ids in {"query_ids": query_ids, "key_ids": key_ids}.items():
    _check_integers(name, ids)
    if not ids.ndim:
      raise AssertionError(f"{name} must have an axis of tokens, got {ids}")
  return Segments(query_ids, key_ids)


def prefix(length: int | Shaped[jax.Array, "B"]) -> Mask:
  """Every query may attend to the keys at positions before `length`.

  Combined with a causal mask it is the prefix language model of "Exploring the
  Limits of Transfer Learning with a Unified Text-to-Text Transformer", Raffel
  et al., 2019, section 3.2.1 (https://arxiv.org/abs/1910.10683).

  Args:
    length: an integer, or int [B] or [B, ...], one per example.

  Returns:
    A mask.

  Example:
    >>> (causal() | prefix(2)).materialize(3, 3)
    Array([[ True,  True, False],
           [ True,  True, False],
           [ True,  True,  True]], dtype=bool)
  """
  return Below(_integers("length", length))


def where(function: Callable) -> Mask:
  """A query may attend to a key where a function of their positions is true.

  Blockwise attention skips the tiles that the function hides. It evaluates the
  function on all T S pairs, a block of queries after another, when tracing; if
  the function or an offset depends on traced arrays, it computes all tiles. See
  "FlexAttention: The Flexibility of PyTorch with the Performance of
  FlashAttention", He et al., 2024 (https://pytorch.org/blog/flexattention/),
  where the function is called `mask_mod`.

  Args:
    function: (query_positions, key_positions) -> bool [..., T, S]. The
      positions are int32 and broadcast to the scores, [..., T, 1] and
      [..., 1, S]; they are NumPy arrays or JAX arrays. Arrays that the function
      indexes must be JAX arrays.

  Returns:
    A mask.

  Raises:
    ValueError: if `function` is not callable, or takes other arguments.

  Example:
    >>> def dilated(query_positions, key_positions):
    ...   return (query_positions - key_positions) % 2 == 0
    >>> (where(dilated) & causal()).materialize(3, 3)
    Array([[ True, False, False],
           [False,  True, False],
           [ True, False,  True]], dtype=bool)
  """
  if not callable(function):
    raise ValueError(f"function must be a function, got {function!r}")
  positions = ("query_positions", "key_positions")
  check_takes(function, positions, "the function of masks.where")
  return Where(function)
