"""cuDNN's flash attention, called through JAX's interface to it.

The kernel has first derivatives in reverse mode only.
`implementation="blockwise"` has all the others.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.axes import with_rank
from attention.biases import ArrayBias
from attention.implementations.blockwise import Blockwise
from attention.implementations.non_finite import with_finite_tokens
from attention.masks.types import Band, Below, Combined, Mask, MaskView
from attention.normalizers import is_softmax
from attention.positional import GroupHeads, TilePositions
from attention.request import Request
from attention.scores import Score
from attention.scores.base import Placed
from attention.scores.classical import DotProduct, ScaledDot, scaled
from attention.scores.wrappers import MappedKeys, QueryKeyNorm
from attention.softmax import Statistics, from_lse, of_rows

_HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
# A mask that the kernel does not know is an array [..., T, S]; beyond this
# size in bytes, the blockwise implementation needs less memory.
_LARGEST_ARRAY = 256 << 20
_SINGLE = (Placed, MappedKeys, QueryKeyNorm)


@dataclasses.dataclass(frozen=True)
class CuDNN:
  """cuDNN's kernel: dot products in half precision, on a GPU."""

  def obstacle(self, request: Request) -> str | None:
    """Why the kernel cannot serve a request, or None if it can."""
    platform = request.branch or request.platform
    if platform not in (None, "cuda", "gpu"):
      return f"needs a GPU, the platform is {platform}"
    if _dot_product(request.score) is None:
      name = type(request.score).__name__
      return f"does not support the {name} score, only dot products"
    if not is_softmax(request.normalizer):
      return "computes softmax only"
    if request.dropout is not None:
      return "does not support dropout"
    if request.combined is not None:
      return "has no derivatives for a shard of the keys"
    tokens = jax.eval_shape(lambda: _mapped(request))
    return (
      _obstacle_of_arrays(*tokens)
      or _obstacle_of_pairs(request)
      or _obstacle_of_kernel(request, tokens)
    )

  def __call__(self, request: Request) -> tuple[jax.Array, Any]:
    """The context [..., T, E] and statistics, of a request it can serve."""
    context, statistics = with_finite_tokens(request, _results)
    return context, statistics if request.return_lse else None


class _Pattern(NamedTuple):
  """A mask, as the kernel knows it: the conjunction of its fields."""

  is_causal: bool = False
  window: int | None = None  # keys before the query's position
  lengths: Any = None  # a number, or an array over leading axes


def _kernel(query, key, value, **options):
  """JAX's interface to cuDNN, for arrays [B, N, T, D]: context and lse."""
  # `jax.nn` has no option for this layout, in which heads precede tokens: it
  # would cost a copy of each array. It also rounds the log-sum-exp.
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  causal, lengths = options.pop("is_causal"), options.pop("lengths")
  if lengths is not None:
    options["q_seqlen"] = jnp.full_like(lengths, query.shape[-2])
    options["kv_seqlen"] = lengths
    mask_type = cudnn.MaskType.PADDING
    if causal:
      mask_type = cudnn.MaskType.PADDING_CAUSAL
  else:
    mask_type = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
  return cudnn.dot_product_attention(
    query, key, value, mask_type=mask_type, qkv_layout="BNTH", **options
  )


def _dot_product(score: Score) -> DotProduct | None:
  """The dot product of mapped tokens that a score computes, or None."""
  while isinstance(score, _SINGLE):
    score = score.score
  return score if isinstance(score, DotProduct) else None


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
  if _heads(query, key, value) is None:
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
  if bias is None and _pattern(request) is not None:
    return None
  length, key_length = request.scores_shape[-2:]
  if length % 2 or key_length % 2:
    return (
      "needs even numbers of queries and keys for this mask or bias, got"
      f" {length} and {key_length}"
    )
  arrays = jax.tree.leaves(jax.eval_shape(lambda: _visible_and_bias(request)))
  size = math.prod(jnp.broadcast_shapes(*(each.shape for each in arrays)))
  size *= request.query.dtype.itemsize
  if size > _LARGEST_ARRAY:
    return f"needs an array of {size >> 20} MiB for this mask or bias"
  return None


def _obstacle_of_kernel(request: Request, tokens) -> str | None:
  """What JAX's interface says against a request, or None."""
  pattern = _pattern(request)
  needs_array = pattern is None or request.bias is not None
  if pattern is None or needs_array:
    pattern = _Pattern()
  shape = request.scores_shape[-2:] if needs_array else ()
  shapes = [
    (*heads, *array.shape[-2:])
    for heads, array in zip(_own_heads(*tokens), tokens)
  ]
  has_lengths = pattern.lengths is not None
  return _refusal(
    _kernel, *shapes, shape, tokens[0].dtype, has_lengths, *pattern[:2]
  )


@functools.lru_cache(maxsize=256)
def _refusal(
  kernel, query, key, value, mask, dtype, has_lengths, is_causal, window
) -> str | None:
  """What JAX says against a kernel for arrays of these shapes, or None."""

  def total(*tokens, mask=None, lengths=None):
    context = kernel(
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


def _results(request: Request):
  """The context, the statistics, and the rows that see flagged keys."""
  tokens = _all_batched(*_mapped(request))
  tokens = [
    array.reshape(*heads, *array.shape[-2:])
    for heads, array in zip(_own_heads(*tokens), tokens)
  ]
  pattern, visible, bias, empty = _pattern(request), None, None, None
  if pattern is None or request.bias is not None:
    pattern = _Pattern()
    visible, bias = _visible_and_bias(request)
    empty = ~jnp.any(visible, axis=-1)
  lengths = pattern.lengths
  if lengths is not None:
    lengths = _of_batch(lengths, request)
    ones = (1,) * (len(request.leading[-1:]) + 1)
    empty = (lengths <= 0).reshape(*lengths.shape, *ones)
    # The kernel's result without a key is not specified.
    length = jnp.clip(lengths, 1, request.key.shape[-2])
    lengths = length.ravel().astype(jnp.int32)
  context = _kernel(
    *tokens,
    bias=bias,
    mask=None if visible is None else _four_axes(visible, request),
    lengths=lengths,
    is_causal=pattern.is_causal,
    sliding_window_length=(
      None if pattern.window is None else pattern.window + 1
    ),
    scale=_scale(request.score, tokens[0]),
    return_residual=request.return_lse,
  )
  return _with_leading(request, context, empty)


def _with_leading(request: Request, results, empty):
  """`_results` of the kernel's results; `empty` rows see no key."""
  context, lse = results if request.return_lse else (results, None)
  shape = (*request.leading, request.query.shape[-2])
  context = context.reshape(*shape, context.shape[-1])
  if lse is not None:
    lse = _with_derivative(lse.reshape(shape), request)
  if empty is not None:
    empty = jnp.broadcast_to(empty, shape)
    context = jnp.where(empty[..., None], 0, context)
    lse = None if lse is None else jnp.where(empty, -jnp.inf, lse)
  statistics: Statistics | None
  if lse is not None:
    statistics = from_lse(lse)
  else:
    statistics = None if empty is None else of_rows(~empty, request.dtype)

  def rows_that_see(flags):
    visible, _ = _visible_and_bias(request, with_bias=False)
    return jnp.any(visible & flags[..., None, :], axis=-1)

  return context, statistics, rows_that_see


@jax.custom_jvp
def _substituted(value, carrier):
  """The value, with the derivatives of the carrier."""
  del carrier
  return value


@_substituted.defjvp
def _substituted_jvp(primals, tangents):
  return primals[0], tangents[1]


def _with_derivative(lse, request: Request):
  """The kernel has no derivative of the lse; that is computed blockwise."""
  without_values = dataclasses.replace(request, value=request.value[..., :0])
  carrier = Blockwise()(without_values)[1].lse
  return _substituted(jax.lax.stop_gradient(lse), carrier.astype(lse.dtype))


def _mapped(request):
  score = request.score
  query, key = score.map_query(request.query), score.map_key(request.key)
  inner = _dot_product(score)
  if isinstance(inner, ScaledDot):
    factor = inner.factor(query)
    if not isinstance(factor, numbers.Real):  # the kernel takes numbers only
      query = scaled(query, factor)
  return query, key, request.value


def _scale(score: Score, query: jax.Array) -> float:
  """The scale that `_mapped` has not applied."""
  inner = _dot_product(score)
  factor = inner.factor(query) if isinstance(inner, ScaledDot) else 1.0
  return float(factor) if isinstance(factor, numbers.Real) else 1.0


def _all_batched(*tokens):
  """Batches all arrays over every `jax.vmap` axis, as JAX's kernel requires."""
  zero = jnp.zeros((), tokens[0].dtype)
  for array in tokens:
    zero = jnp.where(False, array.ravel()[0], zero)
  return [array + zero for array in tokens]


def _pattern(request: Request) -> _Pattern | None:
  """The mask, or None if it has to become an array."""
  pattern = _Pattern()
  for mask in _conjuncts(request.mask):
    match mask:
      case Band(left=None | int(), right=0) if not pattern.is_causal:
        pattern = pattern._replace(is_causal=True, window=mask.left)
      case Below(limit=limit) if pattern.lengths is None and (
        jnp.ndim(limit) < max(len(request.leading), 1)
      ):
        pattern = pattern._replace(lengths=limit)
      case _:
        return None
  if pattern.window is None:
    return pattern
  # Rows without a key have NaN derivatives in the kernel.
  length, key_length = request.scores_shape[-2:]
  hides_rows = length > key_length + pattern.window or pattern.window < 0
  return None if hides_rows or pattern.lengths is not None else pattern


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


def _of_batch(lengths, request: Request) -> jax.Array:
  """Lengths for all leading axes but the last."""
  batch = request.leading[:-1]
  lengths = jnp.asarray(lengths)
  ones = (1,) * (len(batch) - lengths.ndim)
  return jnp.broadcast_to(lengths.reshape(*lengths.shape, *ones), batch)


def _visible_and_bias(request: Request, *, with_bias: bool = True):
  """Which pairs are visible [..., T, S], and the finite bias or None."""
  rank = request.query.ndim
  rows, columns = (TilePositions(0, n) for n in request.scores_shape[-2:])
  visible, bias = jnp.ones((1,) * rank, bool), None
  if request.mask is not None:
    block = request.mask.block(rows, columns, rank - 2)
    visible = jnp.asarray(with_rank(block, rank))
  if request.bias is not None:
    bias = with_rank(request.bias.block(rows, columns, rank - 2), rank)
    hidden = jnp.isneginf(bias)
    visible = visible & ~hidden
    bias = jnp.where(hidden, 0, bias) if with_bias else None
  shape = (*visible.shape[:-2], *request.scores_shape[-2:])
  return jnp.broadcast_to(visible, shape), _four_axes(bias, request)


def _four_axes(array, request: Request):
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


def _own_heads(query, key, value):
  """The two leading axes of query, key and value for the kernel."""
  query_heads, memory_heads = _heads(query, key, value)
  return query_heads, memory_heads, memory_heads
