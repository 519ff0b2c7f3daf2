"""Attention with the signatures of `jax.nn` and of Flax."""

import functools
import operator
from collections.abc import Callable
from typing import Annotated as Shaped
from typing import Any

import chex
import jax
import jax.numpy as jnp

from attention import masks
from attention.arrays import axes
from attention.arrays.matmul import matmul_precision
from attention.checks import check_shape, check_tokens
from attention.dropout import make_dropout
from attention.multi_head.grouped_query import attend_heads, heads_weights
from attention.normalizers import as_normalizer
from attention.scores import as_score, scaled_dot, scaled_dot_score
from attention.types import BiasLike, MaskLike, NormalizerLike, ScoreLike


def dot_product_attention(
  query: Shaped[jax.Array, "B T H D | T H D"],
  key: Shaped[jax.Array, "B S K D | S K D"],
  value: Shaped[jax.Array, "B S K D | S K D"],
  bias: BiasLike | None = None,
  mask: MaskLike | None = None,
  *,
  scale: float | None = None,
  is_causal: bool = False,
  query_seq_lengths: Shaped[jax.Array, "B"] | None = None,
  key_value_seq_lengths: Shaped[jax.Array, "B"] | None = None,
  local_window_size: int | tuple[int, int] | None = None,
  implementation: str | None = None,
  return_residual: bool = False,
) -> Shaped[Any, "the query's shape, or a pair of it and the residual"]:
  """A replacement of `jax.nn.dot_product_attention`, with its arguments.

  The context of a query whose keys are all masked out is zero; in `jax.nn` it
  is the mean of the values. As in `jax.nn`, the residual has no gradient;
  `attend(..., return_lse=True)` returns one that has, in float32. Masks and
  biases of this library are accepted too.

  Args:
    query: [B, T, H, D] or [T, H, D].
    key: [B, S, K, D] or [S, K, D]; K divides H.
    value: [B, S, K, D] or [S, K, D].
    bias: broadcasts to [B, H, T, S]; B is 1 if the query has no batch axis.
    mask: boolean, broadcasts to [B, H, T, S].
    scale: factor of the scores; None means D ** -0.5.
    is_causal: whether query i may only attend to keys j <= i.
    query_seq_lengths: int [B]; the context of later queries is zero.
    key_value_seq_lengths: int [B]; later keys are masked out.
    local_window_size: how many keys before and after its own position a query
      may attend to, one number for both or a pair.
    implementation: as in `attend`; "xla" means None.
    return_residual: whether to return the log-sum-exp too.

  Returns:
    [B, T, H, D] or [T, H, D], and with `return_residual` a pair of it and the
    lse, [B, T, H] or [T, H], in the key's dtype.

  Raises:
    AssertionError: if the shapes do not fit, or lengths are no integers; the
      message names the argument.
    ValueError: as in `attend`.

  Example:
    >>> import jax.numpy as jnp
    >>> tokens = jnp.ones((2, 5, 4, 8))
    >>> dot_product_attention(tokens, tokens, tokens, is_causal=True).shape
    (2, 5, 4, 8)
  """
  check_tokens(query=query, key=key, value=value)
  for name, array in (("query", query), ("key", key), ("value", value)):
    check_shape(name, array, length=None, heads=None, features=None)
  without_batch = query.ndim == 3
  if without_batch:  # masks and lengths have a batch axis nevertheless
    query, key, value = (
      axes.with_rank(jnp.asarray(array), 4) for array in (query, key, value)
    )
  batch_size = max(query.shape[0], key.shape[0])
  queries_below = _lengths("query_seq_lengths", query_seq_lengths, batch_size)
  keys_below = _lengths(
    "key_value_seq_lengths", key_value_seq_lengths, batch_size
  )
  restrictions = [
    mask,
    masks.causal() if is_causal else None,
    _window(local_window_size),
    None if keys_below is None else masks.padding(keys_below),
    None
    if queries_below is None
    else _queries_below(queries_below, query.shape[-3]),
  ]
  context, lse = attend_heads(
    *(jnp.swapaxes(array, -2, -3) for array in (query, key, value)),
    score=scaled_dot(scale),
    mask=_intersection(restrictions),
    bias=bias,
    implementation=None if implementation == "xla" else implementation,
    return_lse=return_residual,
  )
  context = jnp.swapaxes(context, -2, -3)
  context = context[0] if without_batch else context
  if lse is None:
    return context
  lse = jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2)).astype(key.dtype)
  return context, lse[0] if without_batch else lse


def _lengths(name: str, lengths: Any, batch_size: int) -> jax.Array | None:
  """Lengths [B] as an array."""
  if lengths is None:
    return None
  lengths = jnp.asarray(lengths)
  chex.assert_type(lengths, int, custom_message=f"{name} must be integers")
  if lengths.shape not in ((batch_size,), (1,)):
    raise AssertionError(
      f"{name} has shape {lengths.shape}, but must be ({batch_size},)"
    )
  return lengths


def _window(size: int | tuple[int, int] | None) -> masks.Mask | None:
  """The mask of `local_window_size`."""
  if size is None:
    return None
  sides = (size, size) if isinstance(size, int) else size
  if not isinstance(sides, tuple) or len(sides) != 2:
    raise TypeError(
      f"local_window_size must be an integer or a pair of them, got {size!r}"
    )
  return masks.sliding_window(*sides)


def _queries_below(lengths: jax.Array, size: int) -> masks.Mask:
  """A mask [B, 1, T, 1] of the first `lengths` [B] queries."""
  lengths = lengths[..., None, None, None]
  rows = jnp.arange(size).reshape((1,) * (lengths.ndim - 2) + (-1, 1))
  return masks.as_mask(rows < lengths)


def _intersection(restrictions) -> masks.Mask | None:
  given = [masks.as_mask(mask) for mask in restrictions if mask is not None]
  return functools.reduce(operator.and_, given) if given else None


def flax_attention_fn(
  score: ScoreLike = scaled_dot_score,
  *,
  normalizer: NormalizerLike | None = None,
) -> Callable:
  """A function for `attention_fn` of Flax's multi-head attention.

  It serves `flax.linen.MultiHeadDotProductAttention` and
  `flax.nnx.MultiHeadAttention`.

  Args:
    score: as in `attend`; its parameters may have a head axis in front.
    normalizer: as in `attend`.

  Returns:
    A function with the arguments of `flax.linen.dot_product_attention` and
    `flax.nnx.dot_product_attention` that attends with `score`. `precision` is
    that of all products, as in `attend`.

  Raises:
    ValueError: if `score` is not callable.
    TypeError: if `normalizer` is no function of scores.

  Example:
    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> from attention import scores
    >>> attention_fn = flax_attention_fn(score=scores.cosine(sharpness=8.0))
    >>> layer = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn)
    >>> tokens = jnp.ones((1, 3, 4))
    >>> outputs, _ = layer.init_with_output(jax.random.key(0), tokens)
    >>> outputs.shape
    (1, 3, 4)
  """
  bound, normalizer = as_score(score), as_normalizer(normalizer)

  def attention_fn(
    query,
    key,
    value,
    bias=None,
    mask=None,
    broadcast_dropout=True,
    dropout_rng=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    precision=None,
    module=None,
    force_fp32_for_softmax=False,
    einsum_dot_general=None,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
    promote_dtype=None,
    is_causal=False,
  ):
    del promote_dtype
    _check_none(
      einsum_dot_general=einsum_dot_general,
      qk_attn_weights_einsum=qk_attn_weights_einsum,
      attn_weights_value_einsum=attn_weights_value_einsum,
    )
    dtype = dtype or jnp.result_type(query, key, value)
    query, key, value = (
      jnp.swapaxes(jnp.asarray(array, dtype), -2, -3)
      for array in (query, key, value)
    )
    mask = _intersection(
      [_boolean(mask), masks.causal() if is_causal else None]
    )
    arguments = {
      "score": bound,
      "mask": mask,
      "bias": bias,
      "normalizer": normalizer,
    }
    rate = 0.0 if deterministic else dropout_rate
    dropout = make_dropout(rate, dropout_rng, shared=broadcast_dropout)
    with matmul_precision(precision):
      if module is not None:
        weights = heads_weights(query, key, **arguments)
        # The softmax is always computed in float32 at least.
        kept = weights if force_fp32_for_softmax else weights.astype(dtype)
        module.sow(_intermediates(module), "attention_weights", kept)
      context, _ = attend_heads(query, key, value, dropout=dropout, **arguments)
    return jnp.swapaxes(context, -2, -3)

  return attention_fn


def _check_none(**arguments: Any) -> None:
  """Raises for arguments of Flax's functions that have no effect here."""
  for name, value in arguments.items():
    if value is not None:
      raise NotImplementedError(f"{name} must be None, got {value!r}")


def _intermediates(module: Any) -> Any:
  """The collection of a Linen module, or the type of variable of NNX."""
  from flax import linen, nnx  # later than `import attention`, which is quick

  is_linen = isinstance(module, linen.Module)
  return "intermediates" if is_linen else nnx.Intermediate


def _boolean(mask):
  """Flax masks are numbers by default; nonzero means attend."""
  if mask is None or not hasattr(mask, "dtype"):
    return mask
  return jnp.asarray(mask, bool)
