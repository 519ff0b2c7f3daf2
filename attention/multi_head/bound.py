"""Multi-head attention with its weights, for the function and the module."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from attention.arrays.matmul import matmul_precision
from attention.arrays.meshes import on_any_mesh
from attention.cache import Cache, check_cache, extend
from attention.checks import check_shape
from attention.dispatch import ImplementationLike
from attention.multi_head.grouped_query import Grouping, KeyValue, heads_weights
from attention.multi_head.mesh_axes import MeshAxes, attend_sharded_heads
from attention.multi_head.projections import (
  Projection,
  combine_heads,
  project_heads,
)
from attention.normalizers import Normalizer
from attention.positions import RotaryOptions
from attention.positions import rotary as rotated
from attention.scores import Score, with_mapped_keys
from attention.scores.placed_examples import place_examples
from attention.taylor import with_taylor_coefficients

_Method = TypeVar("_Method", bound=Callable)


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
