"""cuDNN's flash attention through jax.nn, for what it serves.

It is a hand-written kernel with a hand-written derivative: reverse mode once,
no forward mode and no second order. `implementation="blockwise"` has these.
"""

import functools
import math

import jax
import jax.numpy as jnp

from attention.biases.types import Bias
from attention.dropout import Dropout
from attention.masks.types import Band, Mask
from attention.reference import without_bad_tokens
from attention.scores.bound import DotProduct
from attention.scores.protocol import Score

_HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_kernel = functools.partial(
  jax.nn.dot_product_attention, implementation="cudnn", scale=1.0
)


def obstacle(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  score: Score,
  mask: Mask | None,
  bias: Bias | None,
  dropout: Dropout | None,
  return_lse: bool,
) -> str | None:
  """Why the kernel cannot serve a call, None if it can.

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk].
    value: [..., S, E].
    score: a bound score.
    mask: a mask or None.
    bias: a bias or None.
    dropout: dropout of the weights or None.
    return_lse: whether the log-sum-exp is wanted, with its gradient.

  Returns:
    A reason, to follow "cuDNN".
  """
  dtypes = {array.dtype for array in (query, key, value)}
  features, value_size = query.shape[-1], value.shape[-1]
  if jax.default_backend() != "gpu":
    return f"needs a GPU, the backend is {jax.default_backend()}"
  if not isinstance(score, DotProduct):
    return f"has no {type(score).__name__} score, only dot products"
  if len(dtypes) > 1 or not dtypes <= set(_HALF):
    names = ", ".join(sorted(map(str, dtypes)))
    return f"computes in one of bfloat16 and float16, got {names}"
  if mask is not None and not _is_causal(mask):
    return "is used here without a mask or with masks.causal() alone"
  for name, argument in (("bias", bias), ("dropout", dropout)):
    if argument is not None:
      return f"is used here without {name}"
  if return_lse:
    return "has no gradient of the log-sum-exp"
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


def context(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  score: Score,
  mask: Mask | None,
) -> jax.Array:
  """The context [..., T, E] of a call without an obstacle."""
  poisoned = None
  if mask is not None:
    (query, bad_query), (key, bad_key), (value, bad_value) = map(
      without_bad_tokens, (query, key, value)
    )
    poisoned = bad_query | _seen_causally(bad_key | bad_value, query.shape[-2])
  query, key = score.map_query(query), score.map_key(key)
  query_heads, memory_heads = _heads(query, key, value)
  attended = _kernel(
    *(
      jnp.swapaxes(x.reshape(*heads, *x.shape[-2:]), -2, -3)
      for x, heads in (
        (query, query_heads),
        (key, memory_heads),
        (value, memory_heads),
      )
    ),
    is_causal=mask is not None,
  )
  attended = jnp.swapaxes(attended, -2, -3)
  attended = attended.reshape(*query.shape[:-1], value.shape[-1])
  if poisoned is None:
    return attended
  return jnp.where(poisoned[..., None], jnp.nan, attended)


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
