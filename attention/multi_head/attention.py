"""Multi-head attention as a pure function of its weights."""

from typing import Annotated as Shaped
from typing import Any

import jax
from jax.lax import PrecisionLike

from attention.arrays.matmul import precision_name
from attention.cache import Cache
from attention.checks import check_shape, check_tokens
from attention.dispatch import ImplementationLike
from attention.dropout import make_dropout
from attention.multi_head.bound import MultiHead
from attention.multi_head.mesh_axes import MeshAxes, as_mesh_axes
from attention.multi_head.projections import Projection
from attention.normalizers import as_normalizer
from attention.positions import RotaryOptions
from attention.scores import as_score, scaled_dot_score
from attention.types import BiasLike, MaskLike, NormalizerLike, ScoreLike

__all__ = ["multi_head_attention"]


def multi_head_attention(
  query: Shaped[jax.Array, "... T Dq"],
  key: Shaped[jax.Array, "... S Dk"],
  value: Shaped[jax.Array, "... S Dv"],
  query_weight: Shaped[jax.Array, "Dq H D"],
  key_weight: Shaped[jax.Array, "Dk K D"],
  value_weight: Shaped[jax.Array, "Dv K E"],
  output_weight: Shaped[jax.Array, "H E Do"],
  *,
  query_bias: Shaped[jax.Array, "H D"] | None = None,
  key_bias: Shaped[jax.Array, "K D"] | None = None,
  value_bias: Shaped[jax.Array, "K E"] | None = None,
  output_bias: Shaped[jax.Array, "Do"] | None = None,
  score: ScoreLike = scaled_dot_score,
  mask: MaskLike | None = None,
  bias: BiasLike | None = None,
  normalizer: NormalizerLike | None = None,
  rotary: bool | RotaryOptions = False,
  positions: Shaped[jax.Array, "... T"] | None = None,
  key_positions: Shaped[jax.Array, "... S"] | None = None,
  cache: Cache | None = None,
  lengths: Shaped[jax.Array, "..."] | None = None,
  mesh_axes: MeshAxes | None = None,
  dropout_rate: float = 0.0,
  rng: jax.Array | None = None,
  implementation: ImplementationLike = None,
  precision: PrecisionLike = None,
) -> Shaped[Any, "... T Do, or a pair of it and the cache"]:
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
    normalizer: as in `attend`; its parameters may have an axis of heads, [H].
    rotary: whether to rotate projected queries and keys by their positions, or
      the options to do so, see `attention.positions.rotary`.
    positions: [T] or [..., T], the positions by which queries and keys are
      rotated, for instance those within each segment; None means 0 to T - 1, or
      with a cache those after its tokens. Masks and biases do not use them.
    key_positions: [S] or [..., S], the positions of the keys; None means
      `positions`.
    cache: None; or, for decoding, the keys and values of all earlier tokens,
      from `attention.cache.init((..., K), max_length, D, E)` or from the
      previous call. The mask is then `masks.causal() & mask`. Rows of `mask`
      and `bias` are positions in the sequence, and S is `max_length`, unless
      the cache is rolling, see `attention.cache.extend`. Additive
      and concat scores of hidden size A need a cache with keys of size A;
      concat needs one with H heads of keys if K < H. Under `jax.jit`, tokens
      past its end raise no error, see `attention.cache.append`.
    lengths: int [...], the number of tokens of each example in `key`, for a
      cache with a length per example; the others are padding, whose outputs
      have no meaning. None means all.
    mesh_axes: an `attention.modules.MeshAxes` that shards heads and tokens over
      a mesh, or None.
    dropout_rate: the probability to drop a weight.
    rng: a random key, required if `dropout_rate` is positive.
    implementation: as in `attend`.
    precision: as in `attend`, also of the projections.

  Returns:
    [..., T, Do] in the projected query's dtype; with `cache` a pair of these
    outputs and the cache with the new tokens.

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    NotImplementedError: if `cache` is given and `mesh_axes` shards tokens, or
      the cache has a length per example and a score that depends on positions
      has a parameter per example.
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
  check_shape(
    "query_weight", query_weight, features=None, heads=None, head_size=None
  )
  layer = MultiHead(
    {
      "query": Projection(query_weight, query_bias),
      "key": Projection(key_weight, key_bias),
      "value": Projection(value_weight, value_bias),
      "output": Projection(output_weight, output_bias),
    },
    as_score(score),
    as_normalizer(normalizer),
    query_heads=query_weight.shape[-2:],
    rotary=rotary,
    mesh_axes=as_mesh_axes(mesh_axes),
    implementation=implementation,
    precision=precision_name(precision),
  )
  dropout = make_dropout(dropout_rate, rng)
  outputs, cache = layer(
    query,
    key,
    value,
    mask=mask,
    bias=bias,
    positions=positions,
    key_positions=key_positions,
    cache=cache,
    lengths=lengths,
    dropout=dropout,
  )
  return outputs if cache is None else (outputs, cache)
