"""Doors of the shapes that other libraries' callers know."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention import api, masks
from attention.checks import check_rank, check_tokens
from attention.dropout import make_dropout
from attention.multi_head import attend_heads
from attention.scores import Score, as_score, scaled_dot, scaled_dot_score


def dot_product_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: Any = None,
  mask: Any = None,
  *,
  scale: float | None = None,
  is_causal: bool = False,
  query_seq_lengths: jax.Array | None = None,
  key_value_seq_lengths: jax.Array | None = None,
  local_window_size: int | tuple[int, int] | None = None,
  implementation: str | None = None,
  return_residual: bool = False,
) -> Any:
  """A drop-in for `jax.nn.dot_product_attention`, with its arguments.

  Three things differ: a row that may attend to nothing is zero (there it is
  the average of what is masked), the residual is float32 and has gradients,
  and biases and masks may be those of this library too. What there is "xla" is
  here the choice of `attend`.

  Args:
    query: [B, T, H, D] or [T, H, D].
    key: [B, S, K, D] or [S, K, D]; K divides H.
    value: [B, S, K, D] or [S, K, D].
    bias: broadcasts to [B, H, T, S] or [H, T, S].
    mask: boolean, broadcasts to [B, H, T, S] or [H, T, S].
    scale: of the scores; None means D ** -0.5.
    is_causal: whether query i sees only keys j <= i.
    query_seq_lengths: int [B]; the rest of the rows is zero.
    key_value_seq_lengths: int [B]; the rest of the keys is masked out.
    local_window_size: how far a query sees to the left and to the right, one
      number for both or a pair.
    implementation: as in `attend`, or "xla", which is None.
    return_residual: whether to return the log-sum-exp too.

  Returns:
    [B, T, H, D] or [T, H, D], and with `return_residual` a pair of it and the
    lse, [B, T, H] or [T, H].

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    ValueError: as in `attend`.

  Example:
    >>> import jax.numpy as jnp
    >>> tokens = jnp.ones((2, 5, 4, 8))
    >>> dot_product_attention(tokens, tokens, tokens, is_causal=True).shape
    (2, 5, 4, 8)
  """
  check_tokens(query=query, key=key, value=value)
  for name, array in (("query", query), ("key", key), ("value", value)):
    check_rank(array, name, "length, heads, features")
  restrictions = [mask, masks.causal() if is_causal else None]
  if local_window_size is not None:
    if isinstance(local_window_size, int):
      local_window_size = (local_window_size, local_window_size)
    restrictions.append(masks.sliding_window(*local_window_size))
  if key_value_seq_lengths is not None:
    restrictions.append(masks.padding(jnp.asarray(key_value_seq_lengths)))
  if query_seq_lengths is not None:
    present = _positions_below(query_seq_lengths, query.shape[-3])
    restrictions.append(masks.as_mask(present))
  context, lse = attend_heads(
    *(jnp.swapaxes(array, -2, -3) for array in (query, key, value)),
    score=scaled_dot(scale),
    mask=_all_of(restrictions),
    bias=bias,
    implementation=None if implementation == "xla" else implementation,
    return_lse=return_residual,
  )
  context = jnp.swapaxes(context, -2, -3)
  return context if lse is None else (context, jnp.swapaxes(lse, -1, -2))


def _positions_below(lengths, size: int) -> jax.Array:
  """Bool [B, 1, T, 1] for lengths [B]: which queries there are."""
  lengths = jnp.asarray(lengths)[..., None, None, None]
  return jnp.arange(size).reshape((1,) * (lengths.ndim - 2) + (-1, 1)) < lengths


def _all_of(restrictions):
  combined = None
  for mask in restrictions:
    if mask is not None:
      mask = masks.as_mask(mask)
      combined = mask if combined is None else combined & mask
  return combined


def flax_attention_fn(score: Score | Callable = scaled_dot_score) -> Callable:
  """A function for Flax's `MultiHeadDotProductAttention(attention_fn=...)`.

  Args:
    score: as in `attend`; its parameters may have a head axis in front.

  Returns:
    A function with the arguments of `flax.linen.dot_product_attention` that
    attends with `score`.

  Raises:
    ValueError: if `score` is not callable.

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
  bound = as_score(score)

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
    force_fp32_for_softmax=True,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
  ):
    """Attends in the [..., T, H, D] order; see `flax_attention_fn`."""
    del force_fp32_for_softmax  # it always is
    for name, choice in (
      ("precision", precision),
      ("qk_attn_weights_einsum", qk_attn_weights_einsum),
      ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
      if choice is not None:
        raise NotImplementedError(f"{name} must be None, got {choice!r}")
    query, key, value = (
      jnp.swapaxes(jnp.asarray(array, dtype), -2, -3)
      for array in (query, key, value)
    )
    arguments = {"score": bound, "mask": _boolean(mask), "bias": bias}
    if module is not None:
      weights = api.attention_weights(query, key, **arguments)
      module.sow("intermediates", "attention_weights", weights)
    rate = 0.0 if deterministic else dropout_rate
    dropout = make_dropout(rate, dropout_rng, shared=broadcast_dropout)
    context, _ = attend_heads(query, key, value, dropout=dropout, **arguments)
    return jnp.swapaxes(context, -2, -3)

  return attention_fn


def _boolean(mask):
  """Flax makes its masks of numbers by default; nonzero means attend."""
  if mask is None or not hasattr(mask, "dtype"):
    return mask
  return jnp.asarray(mask, bool)
