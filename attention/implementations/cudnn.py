"""cuDNN's flash attention, called through `jax.nn.dot_product_attention`.

The kernel has first derivatives in reverse mode only.
`implementation="blockwise"` has all the others.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.non_finite import with_finite_tokens
from attention.masks.types import Band, Mask
from attention.normalizers import is_softmax
from attention.request import Request
from attention.scores.classical import DotProduct, ScaledDot, scaled

_HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_kernel = functools.partial(
  jax.nn.dot_product_attention, implementation="cudnn"
)


@dataclasses.dataclass(frozen=True)
class CuDNN:
  """cuDNN's kernel: dot products in half precision, on a GPU, no lse."""

  def obstacle(self, request: Request) -> str | None:
    """Why the kernel cannot serve a request, or None if it can."""
    platform = request.platform
    if platform is None:
      platform = "gpu" if _has_gpu() else jax.default_backend()
    if platform != "gpu":
      return f"needs a GPU, the platform is {platform}"
    if not isinstance(request.score, DotProduct):
      name = type(request.score).__name__
      return f"does not support the {name} score, only dot products"
    if request.mask is not None and not _is_causal(request.mask):
      return "supports masks.causal() only, or no mask"
    if not is_softmax(request.normalizer):
      return "computes softmax only"
    for name in ("bias", "dropout"):
      if getattr(request, name) is not None:
        return f"does not support {name}"
    if request.return_lse or request.combined is not None:
      return "has no gradient of the log-sum-exp"
    return _obstacle_of_arrays(*jax.eval_shape(lambda: _mapped(request)))

  def __call__(self, request: Request) -> tuple[jax.Array, None]:
    """The context [..., T, E] of a request without an obstacle."""
    return with_finite_tokens(request, _context)[0], None


def _has_gpu() -> bool:
  """Whether JAX can run a program on a GPU."""
  try:
    return bool(jax.devices("gpu"))
  except RuntimeError:
    return False


def _obstacle_of_arrays(query, key, value) -> str | None:
  """Why the kernel cannot serve mapped tokens, or None if it can."""
  dtypes = {array.dtype for array in (query, key, value)}
  if len(dtypes) > 1 or not dtypes <= set(_HALF):
    names = ", ".join(sorted(map(str, dtypes)))
    return f"computes in one of bfloat16 and float16, got {names}"
  features, value_size = query.shape[-1], value.shape[-1]
  if features != value_size or features % 8 or features > 128:
    return (
      "needs as many features in values as in queries, a multiple of 8 up to "
      f"128, got {features} and {value_size}"
    )
  if 0 in (*query.shape, *key.shape):
    return "needs at least one query and one key"
  if _heads(query, key, value) is None:
    return (
      "needs the same leading axes in query, key and value, or [B, K, G] and "
      f"[B, K, 1], got {query.shape[:-2]}, {key.shape[:-2]} and "
      f"{value.shape[:-2]}"
    )
  return None


def _context(request: Request):
  """The context, no lse, and the rows that see flagged keys."""
  tokens = _all_batched(*_mapped(request))
  query_heads, memory_heads = _heads(*tokens)
  context = _kernel(
    *(
      jnp.swapaxes(array.reshape(*heads, *array.shape[-2:]), -2, -3)
      for array, heads in zip(tokens, (query_heads, memory_heads, memory_heads))
    ),
    is_causal=request.mask is not None,
    scale=_scale(request.score, tokens[0]),
  )
  context = jnp.swapaxes(context, -2, -3)
  context = context.reshape(*tokens[0].shape[:-1], context.shape[-1])
  length = request.query.shape[-2]
  return context, None, functools.partial(_rows_that_see, length=length)


def _mapped(request):
  score = request.score
  query, key = score.map_query(request.query), score.map_key(request.key)
  if isinstance(score, ScaledDot):
    factor = score.factor(query)
    if not isinstance(factor, numbers.Real):  # the kernel takes numbers only
      query = scaled(query, factor)
  return query, key, request.value


def _scale(score: Any, query: jax.Array) -> float:
  """The scale that `_mapped` has not applied."""
  factor = score.factor(query) if isinstance(score, ScaledDot) else 1.0
  return float(factor) if isinstance(factor, numbers.Real) else 1.0


def _all_batched(*tokens):
  """Batches all arrays over every `jax.vmap` axis, as JAX's kernel requires."""
  zero = jnp.zeros((), tokens[0].dtype)
  for array in tokens:
    zero = jnp.where(False, array.ravel()[0], zero)
  return [array + zero for array in tokens]


def _is_causal(mask: Mask) -> bool:
  if not isinstance(mask, Band) or mask.left is not None:
    return False
  return isinstance(mask.right, int) and mask.right == 0


def _heads(query, key, value):
  """(B, H) and (B, K) of queries and of keys, or None if they have neither."""
  leading, memory = query.shape[:-2], key.shape[:-2]
  if memory != value.shape[:-2]:
    return None
  if leading == memory:
    batch, heads = math.prod(leading[:-1]), math.prod(leading[-1:])
    return (batch, heads), (batch, heads)
  if leading[:-1] == memory[:-1] and memory[-1] == 1:
    batch, groups = math.prod(leading[:-1]), leading[-1]
    return (batch, groups), (batch, 1)
  return None


def _rows_that_see(flags, length: int):
  """The queries with a flagged key at their own position or before."""
  seen = jax.lax.cummax(flags.astype(jnp.int32), axis=flags.ndim - 1) > 0
  last = jnp.minimum(jnp.arange(length), flags.shape[-1] - 1)
  return jnp.take(seen, last, axis=-1)
