"""Why the kernel cannot serve a request."""

import functools
import math

import jax
import jax.numpy as jnp

from attention.biases.types import ArrayBias
from attention.implementations.cudnn import kernel
from attention.implementations.cudnn.pairs import (
  Pattern,
  num_rows,
  pattern_of,
  visible_and_bias,
)
from attention.implementations.cudnn.tokens import heads_of, mapped
from attention.implementations.dot_products import dot_product
from attention.normalizers import is_softmax
from attention.request import Request

_HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
# A mask that the kernel does not know is an array [..., T, S]; beyond this
# size in bytes, the blockwise implementation needs less memory.
_LARGEST_ARRAY = 256 << 20


def obstacle(request: Request) -> str | None:
  """Why the kernel cannot serve a request, or None if it can."""
  platform = request.branch or request.platform
  if platform not in (None, "cuda", "gpu"):
    return f"needs a GPU, the platform is {platform}"
  if dot_product(request.score) is None:
    name = type(request.score).__name__
    return f"does not support the {name} score, only dot products"
  if not is_softmax(request.normalizer):
    return "computes softmax only"
  if request.dropout is not None:
    return "does not support dropout"
  if request.combined is not None:
    return "has no derivatives for a shard of the keys"
  if not request.has_known_sizes:
    return f"needs known sizes, got scores of shape {request.scores_shape}"
  tokens = jax.eval_shape(lambda: mapped(request))
  return (
    _obstacle_of_arrays(*tokens)
    or _obstacle_of_pairs(request)
    or _refusal_of(request, tokens, num_features(request, tokens))
  )


def _obstacle_of_arrays(query, key, value) -> str | None:
  """Why the kernel cannot serve mapped tokens, or None if it can."""
  dtypes = {array.dtype for array in (query, key, value)}
  if len(dtypes) > 1 or not dtypes <= set(_HALF):
    names = ", ".join(sorted(map(str, dtypes)))
    return f"computes in one of bfloat16 and float16, got {names}"
  if query.shape[-1] % 8 or value.shape[-1] % 8:
    return (
      "needs multiples of 8 features in queries and in values, got"
      f" {query.shape[-1]} and {value.shape[-1]}"
    )
  if 0 in (*query.shape, *key.shape, *value.shape):
    return "needs at least one query, one key and one feature"
  if heads_of(query, key, value) is None:
    return (
      "needs the same leading axes in query, key and value, or [B, K, G] and "
      f"[B, K, 1], got {query.shape[:-2]}, {key.shape[:-2]} and "
      f"{value.shape[:-2]}"
    )
  return None


def _obstacle_of_pairs(request: Request) -> str | None:
  """Why the kernel cannot serve the mask and the bias, or None if it can."""
  bias = request.bias
  if bias is not None and not isinstance(bias, ArrayBias):
    return f"supports arrays as a bias only, got {type(bias).__name__}"
  if bias is not None and bias.array.dtype != request.query.dtype:
    return (
      f"needs a bias in the dtype of the query, {request.query.dtype}, got"
      f" {bias.array.dtype}"
    )
  if pattern_of(request) is not None:
    return None
  length, key_length = request.scores_shape[-2:]
  if length % 2 or key_length % 2:
    return (
      "needs even numbers of queries and keys for this mask or bias, got"
      f" {length} and {key_length}"
    )
  arrays = jax.tree.leaves(jax.eval_shape(lambda: visible_and_bias(request)))
  size = math.prod(jnp.broadcast_shapes(*(each.shape for each in arrays)))
  size *= request.query.dtype.itemsize
  if size > _LARGEST_ARRAY:
    return f"needs an array of {size >> 20} MiB for this mask or bias"
  return None


def num_features(request: Request, tokens) -> tuple[int, int]:
  """Features of queries and keys, and of values, that the kernel reads.

  Zeros are added if JAX refuses different numbers: it allows them if the
  process has a Hopper GPU, whichever GPU the program is for.
  """
  own = tokens[0].shape[-1], tokens[2].shape[-1]
  if own[0] == own[1] or _refusal_of(request, tokens, own) is None:
    return own
  return max(own), max(own)


def _refusal_of(
  request: Request, tokens, features: tuple[int, int]
) -> str | None:
  """What JAX says against tokens with these numbers of features, or None."""
  pattern = pattern_of(request)
  length, key_length = request.scores_shape[-2:]
  mask = (length, key_length) if pattern is None else ()
  pattern = pattern or Pattern()
  heads, memory_heads = heads_of(*tokens)
  shapes = (
    (*heads, num_rows(length, pattern.shift), features[0]),
    (*memory_heads, key_length, features[0]),
    (*memory_heads, key_length, features[1]),
  )
  return _refusal(
    kernel.call,
    *shapes,
    mask,
    tokens[0].dtype,
    pattern.lengths is not None,
    *pattern[:2],
  )


@functools.lru_cache(maxsize=256)
def _refusal(
  call, query, key, value, mask, dtype, has_lengths, is_causal, window
) -> str | None:
  """What JAX says against a kernel for arrays of these shapes, or None."""

  def total(*tokens, mask=None, lengths=None):
    context = call(
      *tokens,
      bias=None,
      mask=mask,
      lengths=lengths,
      is_causal=is_causal,
      sliding_window_length=None if window is None else window + 1,
      scale=1.0,
      return_residual=False,
    )
    return context.astype(jnp.float32).sum()

  arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (query, key, value)]
  options = {}
  if mask:
    options["mask"] = jax.ShapeDtypeStruct((1, 1, *mask), jnp.bool_)
  if has_lengths:
    options["lengths"] = jax.ShapeDtypeStruct(query[:1], jnp.int32)
  try:
    jax.eval_shape(jax.grad(total, (0, 1, 2)), *arrays, **options)
  except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
    return f"is refused by JAX: {error}"
  return None
