"""Multi-head attention as a pure function of its weights."""

from collections.abc import Callable
from typing import Any

import jax

from attention.checks import check_axis, check_rank, check_tokens
from attention.dispatch import ImplementationLike, dispatch
from attention.dropout import make_dropout
from attention.grouped_query import Grouping
from attention.heads import (
  combine_heads,
  merge_heads,
  project_heads,
  split_heads,
)
from attention.meshes import on_any_mesh
from attention.scores import Score, scaled_dot_score

__all__ = ["merge_heads", "multi_head_attention", "split_heads"]


@on_any_mesh("TF")
def multi_head_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  query_weight: jax.Array,
  key_weight: jax.Array,
  value_weight: jax.Array,
  output_weight: jax.Array,
  *,
  query_bias: jax.Array | None = None,
  key_bias: jax.Array | None = None,
  value_bias: jax.Array | None = None,
  output_bias: jax.Array | None = None,
  score: Score | Callable = scaled_dot_score,
  mask: Any = None,
  bias: Any = None,
  dropout_rate: float = 0.0,
  rng: jax.Array | None = None,
  implementation: ImplementationLike = None,
) -> jax.Array:
  """Projects to heads, attends in each, and projects the heads back.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.2.2
  (https://arxiv.org/abs/1706.03762); with fewer key/value heads than heads,
  "GQA", Ainslie et al., 2023 (https://arxiv.org/abs/2305.13245), where head h
  looks at key/value head h // (H / K) and nothing is repeated.

  Args:
    query: [..., T, Dq] tokens.
    key: [..., S, Dk] tokens.
    value: [..., S, Dv] tokens, often the same as `key`.
    query_weight: [Dq, H, D].
    key_weight: [Dk, K, D]; K divides H.
    value_weight: [Dv, K, E].
    output_weight: [H, E, Do].
    query_bias: [H, D] or None.
    key_bias: [K, D] or None.
    value_bias: [K, E] or None.
    output_bias: [Do] or None.
    score: as in `attend`; its parameters may have a head axis in front.
    mask: as in `attend`, for scores [..., H, T, S].
    bias: as in `attend`, for scores [..., H, T, S].
    dropout_rate: the probability to drop a weight.
    rng: a random key, needed if `dropout_rate` is positive.
    implementation: as in `attend`.

  Returns:
    [..., T, Do] in the projected query's dtype.

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    ValueError: if K does not divide H, or as in `attend`.

  Example:
    >>> import jax.numpy as jnp
    >>> tokens, weight = jnp.ones((5, 6)), jnp.ones((6, 2, 3))
    >>> output_weight = jnp.ones((2, 3, 6))
    >>> multi_head_attention(
    ...   tokens, tokens, tokens, weight, weight, weight, output_weight
    ... ).shape
    (5, 6)
  """
  check_tokens(query=query, key=key, value=value)
  query = project_heads(query, query_weight, query_bias, name="query_weight")
  key = project_heads(key, key_weight, key_bias, name="key_weight")
  heads = key.shape[-3]
  check_rank(value_weight, "value_weight", "features, heads, head_size")
  check_axis(value_weight, "value_weight", -2, heads, "key_weight's heads")
  value = project_heads(value, value_weight, value_bias, name="value_weight")
  context, _ = attend_heads(
    query,
    key,
    value,
    score=score,
    mask=mask,
    bias=bias,
    dropout=make_dropout(dropout_rate, rng),
    implementation=implementation,
  )
  return combine_heads(context, output_weight, output_bias)


@on_any_mesh("TE", "T")
def attend_heads(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  score: Score | Callable,
  mask: Any,
  bias: Any,
  dropout=None,
  implementation: ImplementationLike = None,
  return_lse: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """`attend` on heads, where K key/value heads serve H heads.

  Args:
    query: [..., H, T, D].
    key: [..., K, S, D].
    value: [..., K, S, E].
    score: as in `attend`.
    mask: as in `attend`, for scores [..., H, T, S].
    bias: as in `attend`, for scores [..., H, T, S].
    dropout: an `attention.dropout.Dropout` or None.
    implementation: as in `attend`.
    return_lse: whether the lse is wanted.

  Returns:
    The context [..., H, T, E] and the lse [..., H, T], None if not wanted.

  Raises:
    ValueError: if K does not divide H, or as in `attend`.

  Example:
    >>> import jax.numpy as jnp
    >>> query, key = jnp.ones((4, 3, 2)), jnp.ones((2, 5, 2))
    >>> context, lse = attend_heads(
    ...   query,
    ...   key,
    ...   key,
    ...   score=scaled_dot_score,
    ...   mask=None,
    ...   bias=None,
    ...   return_lse=True,
    ... )
    >>> context.shape, lse.shape
    ((4, 3, 2), (4, 3))
  """
  grouping = Grouping(query.shape[-3], key.shape[-3])
  context, lse = dispatch(
    grouping.query(query),
    grouping.memory(key),
    grouping.memory(value),
    score=grouping.score(score),
    mask=grouping.mask(mask),
    bias=grouping.bias(bias),
    dropout=dropout,
    implementation=implementation,
    return_lse=return_lse,
  )
  if lse is not None:
    lse = grouping.heads(lse[..., None])[..., 0]
  return grouping.heads(context), lse
