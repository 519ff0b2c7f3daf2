"""Multi-head attention as a pure function of its weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated as Shaped
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from attention.cache import Cache, check_cache, extend
from attention.checks import check_shape, check_tokens
from attention.dispatch import ImplementationLike
from attention.dropout import make_dropout
from attention.grouped_query import Grouping, KeyValue, heads_weights
from attention.matmul import matmul_precision, precision_name
from attention.mesh_axes import (
  MeshAxes,
  as_mesh_axes,
  attend_sharded_heads,
)
from attention.meshes import on_any_mesh
from attention.normalizers import Normalizer, as_normalizer
from attention.positions import RotaryOptions
from attention.positions import rotary as rotated
from attention.projections import Projection, combine_heads, project_heads
from attention.scores import Score, as_score, scaled_dot_score, with_mapped_keys
from attention.scores.placed_examples import place_examples
from attention.taylor import with_taylor_coefficients
from attention.types import BiasLike, MaskLike, NormalizerLike, ScoreLike

__all__ = ["multi_head_attention"]

_Method = TypeVar("_Method", bound=Callable)


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
      concat needs one with H heads of keys if K < H.
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


def _at_precision(method: _Method) -> _Method:
  """The method with the precision of its object."""

  @functools.wraps(method)
  def run(self, *args, **kwargs):
    with matmul_precision(self.precision):
      return method(self, *args, **kwargs)

  return cast(_Method, run)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("projections", "score", "normalizer"),
  meta_fields=(
    "query_heads",
    "rotary",
    "mesh_axes",
    "implementation",
    "precision",
  ),
)
@dataclasses.dataclass(frozen=True, eq=False)
class MultiHead:
  """Multi-head attention with its weights, for the function and the module."""

  # Of "query", "key", "value" and "output", those that the called method needs.
  projections: dict[str, Projection]
  score: Score
  normalizer: Normalizer
  query_heads: tuple[int, ...]  # (H, D)
  rotary: bool | RotaryOptions
  mesh_axes: MeshAxes
  implementation: ImplementationLike
  precision: str | None

  @_at_precision
  @on_any_mesh("TF", like="cache")
  def __call__(
    self,
    query,
    key,
    value,
    *,
    mask,
    bias,
    positions=None,
    key_positions=None,
    cache: Cache | None,
    lengths=None,
    dropout,
  ) -> tuple[jax.Array, Any]:
    """The outputs, and the cache with the new tokens or None."""
    offset: int | jax.Array = 0
    first_key: int | jax.Array = 0
    if cache is None and lengths is not None:
      raise ValueError(
        "lengths are the new tokens of each example in a cache, and there is no"
        " cache; mask=masks.padding(lengths) hides padding"
      )
    if cache is not None:
      check_cache(cache)
      self._check_unsharded_tokens("cache")
      offset, first_key = cache.length, cache.first_position
      if positions is None:
        positions = cache.next_positions(query.shape[-2])
    if key_positions is None:
      key_positions = positions
    key_value = self.project(key, value, positions=key_positions)
    if cache is not None:
      cache, *memory, mask, bias = extend(
        cache, *key_value, mask=mask, bias=bias, lengths=lengths
      )
      key_value = KeyValue(*memory)
    outputs = self.attend(
      query,
      key_value,
      mask=mask,
      bias=bias,
      dropout=dropout,
      positions=positions,
      offset=offset,
      first_key=first_key,
    )
    return outputs, cache

  @_at_precision
  def project(self, key, value, *, positions=None) -> KeyValue:
    """The keys and values of a memory."""
    keys = self.project_key(key, positions=positions)
    values = project_heads(value, self.projections["value"], "value")
    heads = self.projections["key"].weight.shape[-2]
    weight = self.projections["value"].weight
    check_shape(
      "value_weight", weight, heads=heads, head_size=None, fits="key_weight"
    )
    return KeyValue(keys, values)

  @with_taylor_coefficients
  @_at_precision
  def project_key(self, key, *, positions=None) -> jax.Array:
    """The keys of a memory: projected, rotated and mapped by the score."""
    heads = self._rotated_heads("key", key, positions)
    num_heads, size = self.query_heads
    grouping = Grouping(num_heads, heads.shape[-3])
    score, memory = grouping.score(self.score), grouping.memory(heads)

    # `attend` receives mapped keys, which a score cannot check.
    def check(query):
      score.check(grouping.query(query), memory)

    query = jax.ShapeDtypeStruct((num_heads, 1, size), heads.dtype)
    jax.eval_shape(check, query)
    return grouping.heads(score.map_key(memory))

  @_at_precision
  def attend(
    self,
    query,
    key_value: KeyValue,
    *,
    mask,
    bias,
    dropout,
    positions=None,
    offset: int | jax.Array = 0,
    first_key: int | jax.Array = 0,
  ) -> jax.Array:
    """The outputs for a projected memory."""
    # For the score, queries start at position `offset`, keys at `first_key`.
    context = attend_sharded_heads(
      self.mesh_axes,
      self._rotated_heads("query", query, positions),
      *key_value,
      score=place_examples(with_mapped_keys(self.score), offset, first_key),
      mask=mask,
      bias=bias,
      normalizer=self.normalizer,
      dropout=dropout,
      implementation=self.implementation,
    )
    return combine_heads(context, self.projections["output"])

  @_at_precision
  def weights(
    self, query, key, *, mask, bias, positions=None, offset=0
  ) -> jax.Array:
    """The attention weights [..., H, T, S] for keys from `project_key`."""
    self._check_unsharded_tokens("weights")
    weights = heads_weights(
      self._rotated_heads("query", query, positions),
      key,
      score=place_examples(with_mapped_keys(self.score), offset),
      mask=mask,
      bias=bias,
      normalizer=self.normalizer,
    )
    return weights.astype(query.dtype)

  def _rotated_heads(self, name: str, tokens, positions) -> jax.Array:
    """Projected tokens, rotated by positions [..., T]; None: 0 to T - 1."""
    heads = project_heads(tokens, self.projections[name], name)
    if not isinstance(self.rotary, bool | RotaryOptions):
      raise TypeError(
        "rotary must be a bool or attention.positions.RotaryOptions, got "
        f"{self.rotary!r}"
      )
    if self.rotary is False:
      return heads
    options = None if self.rotary is True else self.rotary
    if positions is None and self.mesh_axes.sequence is None:
      return rotated(heads, options=options)
    if positions is None:
      positions = self.mesh_axes.positions(tokens.shape[-2])
    positions = jnp.asarray(positions)
    check_shape("positions", positions, length=tokens.shape[-2], fits=name)
    if positions.ndim > 1:
      positions = positions[..., None, :]  # an axis of heads
    return rotated(heads, positions, options=options)

  def _check_unsharded_tokens(self, name: str) -> None:
    """Raises NotImplementedError if a mesh axis shards tokens."""
    if self.mesh_axes.sequence is not None:
      raise NotImplementedError(
        f"{name} needs all tokens on each device, but"
        f" mesh_axes.sequence={self.mesh_axes.sequence!r} shards them; pass"
        " mesh_axes=None, for a module module.clone(mesh_axes=None)"
      )
