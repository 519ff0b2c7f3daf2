"""Attention whose heads and tokens the devices of a mesh share."""

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
from attention.masks.types import as_mask
from attention.ring import arrange, restore
from attention.ring.attention import ring_dispatch
from attention.ring.order import Order
from attention.scores import Score


@dataclasses.dataclass(frozen=True)
class MeshAxes:
  """Which axes of a mesh share the heads and the tokens of attention.

  Each device then computes attention for its own heads and its own queries;
  keys and values travel around the devices that share a sequence, as in
  `ring_attention`. What is called with it runs under `jax.set_mesh` of a mesh
  that has these axes, of type `Auto`. All other arrays, and the batch, are laid
  out by XLA.

  Attributes:
    heads: an axis of the mesh, or None.
    sequence: likewise.
    order: of the tokens, as in `ring_attention`; `arrange` lays them out.

  Example:
    >>> mesh = jax.make_mesh(
    ...   (1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,)
    ... )
    >>> with jax.set_mesh(mesh):
    ...   MeshAxes(sequence="sequence").arrange(jnp.arange(4), axis=0)
    Array([0, 1, 2, 3], dtype=int32)
  """

  heads: str | None = None
  sequence: str | None = None
  order: Order = "contiguous"

  @property
  def num_head_groups(self) -> int:
    """The number of devices that share the heads."""
    return _size(self.heads)

  @property
  def ring_size(self) -> int:
    """The number of devices that share a sequence."""
    return _size(self.sequence)

  def arrange(self, tokens: jax.Array, *, axis: int) -> jax.Array:
    """Lays a sequence out for the devices, see `attention.ring.arrange`."""
    return self._reordered(arrange, tokens, axis)

  def restore(self, tokens: jax.Array, *, axis: int) -> jax.Array:
    """Undoes `arrange`."""
    return self._reordered(restore, tokens, axis)

  def positions(self, length: int) -> jax.Array:
    """int32 [length]: where arranged tokens stand in the sequence."""
    return self.arrange(jnp.arange(length), axis=0)

  def _reordered(self, reorder, tokens, axis):
    if self.ring_size == 1:
      return tokens
    return reorder(tokens, self.ring_size, axis=axis, order=self.order)

  def dispatch(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    score: Score | Callable,
    mask: Any,
    bias: Any,
    dropout: Dropout | None,
    implementation: ImplementationLike,
    head_axes: int,
    score_has_heads: bool,
  ) -> jax.Array:
    """`attend`, of which each device computes its part.

    Args:
      query: [..., H, T, Dq], or [..., K, G, T, Dq] if `head_axes` is 2.
      key: likewise.
      value: likewise.
      score: of which all arrays have a first axis of heads, or none has.
      mask: of scores [..., T, S], with the query's leading axes.
      bias: likewise.
      dropout: of the weights.
      implementation: as in `attend`.
      head_axes: 1 or 2.
      score_has_heads: whether the score's arrays have an axis of heads.

    Returns:
      The context.

    Raises:
      ValueError: if the heads or tokens do not divide over the devices.
    """
    mask = mask if mask is None else as_mask(mask)
    bias = bias if bias is None else as_bias(bias)
    arguments = query, key, value, score, mask, bias, dropout
    compute: Callable = functools.partial(self._part, implementation)
    if self.num_head_groups == self.ring_size == 1:
      return compute(*arguments)
    axis = -2 - head_axes
    self._check(query, key, axis)

    def part(*arguments):
      *others, mask, bias, dropout = arguments
      if self.heads:
        index, count = jax.lax.axis_index(self.heads), self.num_head_groups
        heads = query.shape[axis]
        mine = index * (heads // count), heads // count, heads, axis
        if mask is not None:
          mask = mask.of_heads(*mine)
        if bias is not None:
          bias = bias.of_heads(*mine)
        if dropout is not None:
          dropout = OfHeads(dropout, index, count, head_axes)
      return compute(*others, mask, bias, dropout)

    whole = PartitionSpec()
    tokens = [_spec(each, axis, self) for each in (query, key, value)]
    by_head = PartitionSpec(self.heads) if score_has_heads else whole
    return jax.shard_map(
      part,
      in_specs=(*tokens, by_head, whole, whole, whole),
      out_specs=tokens[0],
      axis_names={name for name in (self.heads, self.sequence) if name},
    )(*arguments)

  def _part(
    self, implementation, query, key, value, score, mask, bias, dropout
  ):
    """What a device computes."""
    call = functools.partial(
      dispatch if self.ring_size == 1 else self._around,
      score=score,
      mask=mask,
      bias=bias,
      dropout=dropout,
      implementation=implementation,
    )
    return call(query, key, value)[0]

  def _around(self, *tokens, **options):
    assert self.sequence is not None
    return ring_dispatch(
      *tokens, axis_name=self.sequence, order=self.order, **options
    )

  def _check(self, query, key, axis) -> None:
    groups = self.num_head_groups
    heads = {query.shape[axis], key.shape[axis]} - {1}
    if any(count % groups for count in heads):
      raise ValueError(
        f"{key.shape[axis]} key/value heads do not divide over the {groups}"
        f" devices of the axis {self.heads!r}"
      )


def _spec(array, axis: int, mesh_axes: MeshAxes) -> PartitionSpec:
  """How the heads and tokens of an array are shared."""
  names: list[Any] = [None] * array.ndim
  names[-2] = mesh_axes.sequence
  names[axis] = mesh_axes.heads
  return PartitionSpec(*names)


def _size(axis: str | None) -> int:
  """The number of devices of an axis of the mesh that is set."""
  if axis is None:
    return 1
  mesh = jax.sharding.get_abstract_mesh()
  if axis not in mesh.axis_names:
    known = ", ".join(map(repr, mesh.axis_names)) or "none"
    raise ValueError(
      f"MeshAxes names the axis {axis!r}, but the mesh has {known}; call this"
      " under jax.set_mesh(mesh)"
    )
  return mesh.shape[axis]
