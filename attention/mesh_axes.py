"""Multi-head attention with heads and tokens sharded over axes of a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention.biases import as_bias
from attention.dispatch import ImplementationLike, dispatch
from attention.dropout import Dropout, OfHeads
from attention.grouped_query import attend_heads
from attention.masks.types import as_mask
from attention.ring import arrange
from attention.ring.attention import ring_dispatch
from attention.ring.order import Order
from attention.scores import Score, as_score
from attention.scores.base import MappedKeys


@dataclasses.dataclass(frozen=True)
class MeshAxes:
  """The mesh axes over which attention shards heads and tokens.

  Each device computes attention for its own heads and queries. Keys and values
  rotate around the devices that share a sequence, as in `ring_attention`. Call
  attention under `jax.set_mesh(mesh)`; the axes must have the type `Auto`. XLA
  chooses the sharding of the batch and of all other arrays.

  Attributes:
    heads: the mesh axis that shards heads, or None.
    sequence: the mesh axis that shards tokens, or None.
    order: the order of the tokens, as in `ring_attention`. The caller permutes
      tokens to "zigzag" order with `attention.ring.arrange`.

  Example:
    >>> from attention.modules import MultiHeadAttention
    >>> module = MultiHeadAttention(4, mesh_axes=MeshAxes(heads="tensor"))
    >>> auto = (jax.sharding.AxisType.Auto,)
    >>> mesh = jax.make_mesh((2,), ("tensor",), axis_types=auto)  # two devices
    >>> with jax.set_mesh(mesh):
    ...   tokens = jnp.ones((1, 3, 8))
    ...   outputs, _ = module.init_with_output(jax.random.key(0), tokens)
    >>> outputs.shape
    (1, 3, 8)
  """

  heads: str | None = None
  sequence: str | None = None
  order: Order = "contiguous"

  @property
  def num_head_shards(self) -> int:
    """The number of devices over which heads are sharded."""
    return _axis_size(self.heads)

  @property
  def ring_size(self) -> int:
    """The number of devices over which tokens are sharded."""
    return _axis_size(self.sequence)

  def positions(self, length: int) -> jax.Array:
    """int32 [length]: the position in the sequence of each token."""
    places = jnp.arange(length)
    if self.ring_size == 1:
      return places
    return arrange(places, self.ring_size, axis=0, order=self.order)


def attend_sharded_heads(
  mesh_axes: MeshAxes,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  score: Score | Callable,
  mask: Any,
  bias: Any,
  dropout: Dropout | None,
  implementation: ImplementationLike,
) -> jax.Array:
  """The context of `attend_heads`, each device computing its shard."""
  attend: Callable = dispatch
  if mesh_axes.sequence and mesh_axes.ring_size > 1:
    attend = functools.partial(
      ring_dispatch, axis_name=mesh_axes.sequence, order=mesh_axes.order
    )
  compute = functools.partial(
    attend_heads, attend=attend, implementation=implementation
  )
  if mesh_axes.num_head_shards == mesh_axes.ring_size == 1:
    return compute(
      query, key, value, score=score, mask=mask, bias=bias, dropout=dropout
    )[0]
  mask = None if mask is None else as_mask(mask)
  bias = None if bias is None else as_bias(bias)
  parameters, structure = jax.tree.flatten(as_score(score))
  arrays = query, key, value, *parameters
  head_axes = (-3, -3, -3, *_head_axes(as_score(score)))
  count, num_heads = mesh_axes.num_head_shards, query.shape[-3]
  _check_heads(mesh_axes, num_heads, key.shape[-3], value.shape[-3])

  def compute_shard(arrays, mask, bias, dropout):
    if mesh_axes.heads:
      index, size = jax.lax.axis_index(mesh_axes.heads), num_heads // count
      arrays = [
        array if sharded else _head_of_shard(array, axis, index, count)
        for array, axis, sharded in zip(arrays, head_axes, is_sharded)
      ]
      own = index * size, size, num_heads
      mask = None if mask is None else mask.of_heads(*own)
      bias = None if bias is None else bias.of_heads(*own)
      if dropout is not None:
        rank = 1 if arrays[2].shape[-3] == size else 2  # [H] or [K, G]
        dropout = OfHeads(dropout, index, count, rank)
    score = jax.tree.unflatten(structure, arrays[3:])
    return compute(
      *arrays[:3], score=score, mask=mask, bias=bias, dropout=dropout
    )[0]

  is_sharded = [
    axis is None or array.shape[axis] % count == 0
    for array, axis in zip(arrays, head_axes)
  ]
  specs: list[PartitionSpec] = []
  for array, axis, sharded in zip(arrays, head_axes, is_sharded):
    names: list[str | None] = [None] * jnp.ndim(array)
    if sharded and axis is not None:
      names[axis] = mesh_axes.heads
    if len(specs) < 3:  # query, key and value
      names[-2] = mesh_axes.sequence
    specs.append(PartitionSpec(*names))
  replicated = PartitionSpec()
  return jax.shard_map(
    compute_shard,
    in_specs=(specs, replicated, replicated, replicated),
    out_specs=specs[0],
    axis_names={name for name in (mesh_axes.heads, mesh_axes.sequence) if name},
  )(list(arrays), mask, bias, dropout)


def _head_axes(score: Score) -> list[int | None]:
  """The axis of heads of each array of a score, or None without one."""
  if isinstance(score, MappedKeys):
    return _head_axes(score.score)
  fields = dataclasses.fields(score) if dataclasses.is_dataclass(score) else ()
  if not fields or not all("core" in field.metadata for field in fields):
    return [None] * len(jax.tree.leaves(score))
  ranks = [
    (jnp.ndim(array), field.metadata["core"])
    for field in fields
    if (array := getattr(score, field.name)) is not None
  ]
  return [rank - core - 1 if rank > core else None for rank, core in ranks]


def _head_of_shard(array, axis, index, count: int):
  """The one head of a replicated array that a shard of query heads uses."""
  head = index * array.shape[axis] // count
  return jax.lax.dynamic_slice_in_dim(array, head, 1, axis=axis)


def _check_heads(mesh_axes: MeshAxes, num_heads: int, *memory_heads: int):
  count = mesh_axes.num_head_shards
  if num_heads % count:
    raise ValueError(
      f"{num_heads} heads cannot be sharded over the {count} devices of the "
      f"mesh axis {mesh_axes.heads!r}: the number of devices must divide them"
    )
  for heads in memory_heads:
    if heads % count and count % heads:
      raise ValueError(
        f"{heads} key/value heads cannot be sharded over the {count} devices of"
        f" the mesh axis {mesh_axes.heads!r}: one number must divide the other"
      )


def _axis_size(axis: str | None) -> int:
  """The number of devices along an axis of the current mesh."""
  if axis is None:
    return 1
  mesh = jax.sharding.get_abstract_mesh()
  if axis not in mesh.axis_names:
    known = ", ".join(map(repr, mesh.axis_names)) or "none"
    raise ValueError(
      f"MeshAxes names the axis {axis!r}, but the axes of the current mesh are:"
      f" {known}; call this under jax.set_mesh(mesh)"
    )
  return mesh.shape[axis]
