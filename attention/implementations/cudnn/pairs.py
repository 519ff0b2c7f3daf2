"""The mask and the bias of a request, as the kernel knows them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.reference import pairs
from attention.masks.types import Band, Below, Combined, Mask, MaskView
from attention.positional.base import GroupHeads
from attention.request import Request


class Pattern(NamedTuple):
  """A mask, as the kernel knows it: the conjunction of its fields."""

  is_causal: bool = False
  window: int | None = None  # keys before the query's position
  lengths: Any = None  # a number, or an array over leading axes
  shift: int = 0  # that is added to the positions of queries


def pattern_of(request: Request) -> Pattern | None:
  """The mask, or None if it or a bias has to become an array."""
  if request.bias is not None:
    return None
  pattern = Pattern()
  for mask in _conjuncts(request.mask):
    match mask:
      case Band(left=None | int(), right=int(shift)) if not pattern.is_causal:
        window = None if mask.left is None else mask.left + shift
        pattern = Pattern(True, window, pattern.lengths, shift)
      case Below(limit=limit) if pattern.lengths is None and (
        jnp.ndim(limit) < max(len(request.leading), 1)
      ):
        pattern = pattern._replace(lengths=limit)
      case _:
        return None
  return pattern if _is_supported(pattern, *request.scores_shape[-2:]) else None


def _is_supported(pattern: Pattern, length: int, key_length: int) -> bool:
  """Whether the kernel can compute a pattern, in no more time than an array."""
  # With more rows of zeros than queries, it would compute more pairs. A call
  # without a query is another one.
  if not -length < pattern.shift <= length:
    return False
  if pattern.window is None:
    return True
  # Rows without a key have NaN derivatives in the kernel, and cuDNN has windows
  # for at most as many queries as keys.
  is_empty = pattern.window < 0 or pattern.lengths is not None
  return not is_empty and num_rows(length, pattern.shift) <= key_length


def num_rows(length: int, shift: int) -> int:
  """The rows of queries that the kernel reads, even if they are shifted."""
  # JAX has gradients for even numbers of queries only.
  return length + shift + (length + shift) % 2 if shift else length


def shifted(query: jax.Array, shift: int) -> jax.Array:
  """Queries [B, N, T, D] at their positions for a causal mask.

  The first row is at position 0. Rows of zeros precede the queries, or the
  first queries, which attend to no key, are left out.
  """
  length = query.shape[2]
  after = num_rows(length, shift) - length - shift
  zero = jnp.zeros((), query.dtype)
  rows = (shift, after, 0)
  return jax.lax.pad(query, zero, [(0, 0, 0)] * 2 + [rows, (0, 0, 0)])


def shifted_back(
  rows: jax.Array, length: int, shift: int, empty: float
) -> jax.Array:
  """Rows [B, N, T, ...] of results; `empty` for queries that are left out."""
  after = length + shift - rows.shape[2]
  widths = [(0, 0, 0)] * rows.ndim
  widths[2] = (-shift, after, 0)
  return jax.lax.pad(rows, jnp.asarray(empty, rows.dtype), widths)


def _conjuncts(mask: Mask | None) -> list[Any]:
  """The masks whose conjunction is `mask`."""
  match mask:
    case None:
      return []
    case Combined(operation="and"):
      return _conjuncts(mask.left) + _conjuncts(mask.right)
    case MaskView(transform=GroupHeads()):
      inner = _conjuncts(mask.inner)
      return inner if all(map(_is_shared, inner)) else [mask]
  return [mask]


def _is_shared(mask: Any) -> bool:
  """Whether a mask is the same for all heads."""
  return isinstance(mask, Band | Below) and mask.leading_rank <= 1


def of_batch(lengths, request: Request) -> jax.Array:
  """Lengths for all leading axes but the last."""
  batch = request.leading[:-1]
  lengths = jnp.asarray(lengths)
  ones = (1,) * (len(batch) - lengths.ndim)
  return jnp.broadcast_to(lengths.reshape(*lengths.shape, *ones), batch)


def visible_and_bias(request: Request, *, with_bias: bool = True):
  """Which pairs are visible [..., T, S], and the finite bias or None."""
  visible, biases = pairs.visible_and_bias(request)
  bias = biases[0].astype(request.query.dtype) if with_bias and biases else None
  shape = (*visible.shape[:-2], *request.scores_shape[-2:])
  return jnp.broadcast_to(visible, shape), four_axes(bias, request)


def four_axes(array, request: Request):
  """An array [..., T, S] as [B or 1, N or 1, T, S]."""
  if array is None:
    return None
  leading = array.shape[:-2]
  batch, heads = leading[:-1], leading[-1:]
  if math.prod(batch) > 1:
    batch = request.leading[:-1]
  array = jnp.broadcast_to(array, (*batch, *heads, *request.scores_shape[-2:]))
  return array.reshape(
    math.prod(batch), math.prod(heads), *request.scores_shape[-2:]
  )
