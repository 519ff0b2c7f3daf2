"""Multi-head attention as a pure function of its weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention import axes, masks
from attention.api import attention_weights
from attention.biases import as_bias
from attention.cache import Cache, append
from attention.checks import check_axis, check_rank, check_tokens
from attention.dispatch import ImplementationLike
from attention.dropout import make_dropout
from attention.grouped_query import Grouping, KeyValue
from attention.mesh_axes import MeshAxes, attend_sharded_heads
from attention.meshes import on_any_mesh
from attention.positions import rotary as rotated
from attention.scores import Score, as_score, scaled_dot_score, with_mapped_keys

__all__ = ["merge_heads", "multi_head_attention", "split_heads"]


class Projection(NamedTuple):
  """A weight and a bias or None; error messages name them after `name`."""

  name: str
  weight: jax.Array
  bias: jax.Array | None = None


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
  rotary: bool = False,
  cache: Cache | None = None,
  mesh_axes: MeshAxes | None = None,
  dropout_rate: float = 0.0,
  rng: jax.Array | None = None,
  implementation: ImplementationLike = None,
) -> Any:
  """Projects to heads, attends in each, and projects the heads back.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.2.2
  (https://arxiv.org/abs/1706.03762). With fewer key/value heads than heads, it
  is grouped-query attention: head h uses key/value head h // (H / K). See
  "GQA", Ainslie et al., 2023 (https://arxiv.org/abs/2305.13245).

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
    score: as in `attend`; its parameters may have a leading axis of heads.
    mask: as in `attend`, for scores [..., H, T, S].
    bias: as in `attend`, for scores [..., H, T, S].
    rotary: whether to rotate projected queries and keys by their positions, see
      `attention.positions.rotary`.
    cache: None; or, for decoding, the keys and values of all earlier tokens,
      from `attention.cache.init((..., K), max_length, D, E)` or from the
      previous call. The mask is then `masks.causal() & mask`. Rows of `mask`
      and `bias` are positions in the sequence, and S is `max_length`. Additive
      and concat scores of hidden size A need a cache with keys of size A;
      concat needs one with H heads of keys if K < H.
    mesh_axes: an `attention.modules.MeshAxes` that shards heads and tokens over
      a mesh, or None.
    dropout_rate: the probability to drop a weight.
    rng: a random key, required if `dropout_rate` is positive.
    implementation: as in `attend`.

  Returns:
    [..., T, Do] in the projected query's dtype; with `cache` a pair of these
    outputs and the cache with the new tokens.

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    NotImplementedError: if `cache` is given and `mesh_axes` shards tokens.
    ValueError: if K does not divide H, the tokens do not fit into the cache, or
      as in `attend`.

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
  projections = (
    Projection("query", query_weight, query_bias),
    Projection("key", key_weight, key_bias),
    Projection("value", value_weight, value_bias),
    Projection("output", output_weight, output_bias),
  )
  outputs, cache = attend_tokens(
    query,
    key,
    value,
    projections,
    score=as_score(score),
    mask=mask,
    bias=bias,
    rotary=rotary,
    cache=cache,
    mesh_axes=mesh_axes,
    dropout=make_dropout(dropout_rate, rng),
    implementation=implementation,
  )
  return outputs if cache is None else (outputs, cache)


@on_any_mesh("TF", like="cache")
def attend_tokens(
  query,
  key,
  value,
  projections,
  *,
  mask,
  bias,
  rotary: bool,
  cache: Cache | None,
  **options,
) -> tuple[jax.Array, Cache | None]:
  """`multi_head_attention`; returns the outputs, and the new cache or None."""
  to_query, to_key, to_value, output = projections
  mesh_axes = options["mesh_axes"]
  check_rank(to_query.weight, "query_weight", "features, heads, head_size")
  start: int | jax.Array = 0
  if cache is not None:
    check_unsharded_tokens(mesh_axes, "cache")
    start = cache.length
    mask = (masks.causal() if mask is None else masks.causal() & mask).shifted(
      start
    )
    bias = None if bias is None else as_bias(bias).shifted(start)

  def positions(tokens):
    return token_positions(tokens, start, mesh_axes) if rotary else None

  key_value = project_key_value(
    key,
    value,
    to_key,
    to_value,
    query_heads=to_query.weight.shape[-2:],
    score=options["score"],
    positions=positions(key),
  )
  if cache is not None:
    cache = append(cache, *key_value)
    key_value = KeyValue(cache.key, cache.value)
  outputs = attend_key_value(
    query,
    key_value,
    to_query,
    output,
    mask=mask,
    bias=bias,
    positions=positions(query),
    **options,
  )
  return outputs, cache


def project_key(key, projection: Projection, *, query_heads, score, positions):
  """`KeyValue.key`, for queries with `query_heads`, (H, D), heads."""
  heads = project_heads(key, projection, positions)
  num_heads, size = query_heads
  grouping = Grouping(num_heads, heads.shape[-3])
  score, memory = grouping.score(score), grouping.memory(heads)

  # `attend` receives mapped keys, which a score cannot check.
  def check(query):
    score.check(grouping.query(query), memory)

  jax.eval_shape(check, jax.ShapeDtypeStruct((num_heads, 1, size), heads.dtype))
  return grouping.heads(score.map_key(memory))


def project_key_value(
  key, value, to_key: Projection, to_value: Projection, **options
) -> KeyValue:
  """Projects a memory; `options` are those of `project_key`."""
  key, value = (
    project_key(key, to_key, **options),
    project_heads(value, to_value),
  )
  heads = to_key.weight.shape[-2]
  check_axis(to_value.weight, "value_weight", -2, heads, "key_weight's heads")
  return KeyValue(key, value)


def attend_key_value(
  query,
  key_value: KeyValue,
  to_query: Projection,
  output: Projection,
  *,
  score,
  positions,
  mesh_axes: MeshAxes | None,
  **options,
) -> jax.Array:
  """Attends to a projected memory; `options` are those of `attend_heads`."""
  context = attend_sharded_heads(
    mesh_axes or MeshAxes(),
    project_heads(query, to_query, positions),
    *key_value,
    score=with_mapped_keys(as_score(score)),
    **options,
  )
  return combine_heads(context, output)


def key_value_weights(
  query, key, to_query: Projection, *, score, positions, mask, bias
) -> jax.Array:
  """The attention weights [..., H, T, S] for keys from `project_key`."""
  query = project_heads(query, to_query, positions)
  grouping = Grouping(query.shape[-3], key.shape[-3])
  weights = attention_weights(
    grouping.query(query),
    grouping.memory(key),
    score=grouping.score(with_mapped_keys(as_score(score))),
    mask=grouping.mask(mask),
    bias=grouping.bias(bias),
  )
  return grouping.heads(weights)


def token_positions(tokens, start, mesh_axes: MeshAxes | None) -> jax.Array:
  """int32 [T]: the positions of tokens [..., T, D] from `start` on."""
  return start + (mesh_axes or MeshAxes()).positions(tokens.shape[-2])


def check_unsharded_tokens(mesh_axes: MeshAxes | None, name: str) -> None:
  """Raises NotImplementedError if a mesh axis shards tokens."""
  if mesh_axes is not None and mesh_axes.sequence is not None:
    raise NotImplementedError(
      f"{name} needs all tokens on each device, but"
      f" mesh_axes.sequence={mesh_axes.sequence!r} shards them; pass"
      " mesh_axes=None, for a module module.clone(mesh_axes=None)"
    )


def project_heads(x, projection: Projection, positions=None) -> jax.Array:
  """[..., T, D] to [..., H, T, E] for a weight [D, H, E] and a bias [H, E]."""
  name, weight, bias = projection
  weight_name, bias_name = f"{name}_weight", f"{name}_bias"
  check_rank(weight, weight_name, "features, heads, head_size")
  features = x.shape[-1]
  check_axis(weight, weight_name, -3, features, f"{name}'s number of features")
  heads = jnp.einsum("...td,dhe->...hte", x, weight)
  if bias is not None:
    count, size = weight.shape[-2:]
    check_rank(bias, bias_name, "heads, head_size")
    check_axis(bias, bias_name, -2, count, f"{weight_name}'s number of heads")
    check_axis(bias, bias_name, -1, size, f"{weight_name}'s head size")
    heads = jnp.add(*axes.aligned(heads, bias[:, None, :]))
  return heads if positions is None else rotated(heads, positions)


def combine_heads(x, projection: Projection) -> jax.Array:
  """[..., H, T, E] to [..., T, D] for a weight [H, E, D] and a bias [D]."""
  _, weight, bias = projection
  check_rank(weight, "output_weight", "heads, head_size, features")
  check_axis(weight, "output_weight", -3, x.shape[-3], "the number of heads")
  check_axis(weight, "output_weight", -2, x.shape[-1], "value's head size")
  combined = jnp.einsum("...hte,heo->...to", x, weight)
  if bias is None:
    return combined
  check_rank(bias, "output_bias", "features")
  size = weight.shape[-1]
  check_axis(bias, "output_bias", -1, size, "output_weight's features")
  return jnp.add(*axes.aligned(combined, bias))


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
  """Splits the features into heads: [..., T, H * D] to [..., H, T, D].

  Args:
    x: [..., T, H * D].
    num_heads: H.

  Returns:
    [..., H, T, D].

  Raises:
    AssertionError: if `x` has fewer than two axes.
    ValueError: if H does not divide the number of features.

  Example:
    >>> import jax.numpy as jnp
    >>> split_heads(jnp.ones((2, 5, 12)), 3).shape
    (2, 3, 5, 4)
  """
  check_rank(x, "x", "length, features")
  features = x.shape[-1]
  if num_heads < 1 or features % num_heads:
    raise ValueError(
      f"x has {features} features, which num_heads={num_heads} must divide"
    )
  split = jnp.reshape(x, (*x.shape[:-1], num_heads, features // num_heads))
  return jnp.swapaxes(split, -2, -3)


def merge_heads(x: jax.Array) -> jax.Array:
  """Merges the heads, the inverse of `split_heads`.

  Args:
    x: [..., H, T, D].

  Returns:
    [..., T, H * D].

  Raises:
    AssertionError: if `x` has fewer than three axes.

  Example:
    >>> import jax.numpy as jnp
    >>> merge_heads(jnp.ones((2, 3, 5, 4))).shape
    (2, 5, 12)
  """
  check_rank(x, "x", "heads, length, features")
  swapped = jnp.swapaxes(x, -2, -3)
  return jnp.reshape(swapped, (*swapped.shape[:-2], -1))
