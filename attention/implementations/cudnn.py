"""cuDNN's flash attention through jax.nn, for what it serves.

It is a hand-written kernel with a hand-written derivative: reverse mode once,
no forward mode and no second order. `implementation="blockwise"` has these.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from attention import axes
from attention.masks.types import Band, Mask
from attention.request import Request, without_bad_tokens
from attention.scores.classical import DotProduct

_HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_kernel = functools.partial(
  jax.nn.dot_product_attention, implementation="cudnn", scale=1.0
)


def obstacle(request: Request, return_lse: bool) -> str | None:
  """Why the kernel cannot serve a request, None if it can.

  Args:
    request: the arguments.
    return_lse: whether the log-sum-exp is wanted, with its gradient.

  Returns:
    A reason, to follow "cuDNN".
  """
  if jax.default_backend() != "gpu":
    return f"needs a GPU, the backend is {jax.default_backend()}"
  if not isinstance(request.score, DotProduct):
    return f"has no {type(request.score).__name__} score, only dot products"
  if request.mask is not None and not _is_causal(request.mask):
    return "is used here without a mask or with masks.causal() alone"
  for name in ("bias", "dropout"):
    if getattr(request, name) is not None:
      return f"is used here without {name}"
  if return_lse:
    return "has no gradient of the log-sum-exp"
  return _obstacle_of_arrays(*jax.eval_shape(lambda: _mapped(request)))


def _obstacle_of_arrays(query, key, value) -> str | None:
  """The same for the arrays that the kernel would be given."""
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


def context(request: Request) -> jax.Array:
  """The context [..., T, E] of a call without an obstacle."""
  poisoned = None
  if request.mask is not None:
    tokens, bad = zip(*map(without_bad_tokens, request.tokens))
    request = dataclasses.replace(
      request, **dict(zip(("query", "key", "value"), tokens))
    )
    length = request.query.shape[-2]
    poisoned = bad[0] | _seen_causally(bad[1] | bad[2], length)
  tokens = _mapped(request)
  # JAX wants all three mapped over by a `vmap` that maps over one.
  zero = axes.varying_zero(tokens, tokens[0].dtype)
  tokens = tuple(array + zero for array in tokens)
  query_heads, memory_heads = _heads(*tokens)
  attended = _kernel(
    *(
      jnp.swapaxes(array.reshape(*heads, *array.shape[-2:]), -2, -3)
      for array, heads in zip(tokens, (query_heads, memory_heads, memory_heads))
    ),
    is_causal=request.mask is not None,
  )
  attended = jnp.swapaxes(attended, -2, -3)
  attended = attended.reshape(*tokens[0].shape[:-1], attended.shape[-1])
  if poisoned is None:
    return attended
  return jnp.where(poisoned[..., None], jnp.nan, attended)


def _mapped(request):
  """What the kernel is given."""
  score = request.score
  return (
    score.map_query(request.query),
    score.map_key(request.key),
    request.value,
  )


def _is_causal(mask: Mask) -> bool:
  if not isinstance(mask, Band) or mask.left is not None:
    return False
  return isinstance(mask.right, int) and mask.right == 0


def _heads(query, key, value):
  """(B, H) and (B, K) of queries and of keys, None if they are neither."""
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


def _seen_causally(bad, length: int):
  """Which queries see a bad key at their own position or before."""
  seen = jax.lax.cummax(bad.astype(jnp.int32), axis=bad.ndim - 1) > 0
  last = jnp.minimum(jnp.arange(length), bad.shape[-1] - 1)
  return jnp.take(seen, last, axis=-1)
