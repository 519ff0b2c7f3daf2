"""Multi-head attention sharded over axes of a mesh."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention.arrays.head_parameters import head_axes
from attention.arrays.meshes import is_on_gpu
from attention.dispatch import ImplementationLike, dispatch
from attention.dropout import GroupDropout
from attention.multi_head.example_axes import Examples
from attention.multi_head.grouped_query import attend_heads
from attention.normalizers import (
  FunctionNormalizer,
  Normalizer,
  follows_leading,
)
from attention.ring import arrange
from attention.ring.attention import ring_dispatch
from attention.ring.order import Order, num_chunks
from attention.scores import Score
from attention.scores.pairwise import functions_follow_heads
from attention.transforms.static_zeros import StaticZeros


@dataclasses.dataclass(frozen=True)
class MeshAxes:
  """The mesh axes over which attention shards examples, heads and tokens.

  Each device computes attention for its own examples, heads and queries. Keys
  and values rotate around the devices that share a sequence, as in
  `ring_attention`. Call attention under `jax.set_mesh(mesh)`; the axes must
  have the type `Auto`. XLA chooses the sharding of all other arrays, and that
  of the batch without `batch`. XLA does not partition kernels, so
  `implementation="pallas"` needs all axes of the mesh here.

  Attributes:
    heads: the mesh axis that shards heads, or None. A plain function as the
      score or the normalizer may then not combine or count heads.
    sequence: the mesh axis that shards tokens, or None.
    order: the order of the tokens, as in `ring_attention`. The caller permutes
      tokens to "zigzag" order with `attention.ring.arrange`.
    batch: the mesh axes that shard the first axis of the tokens, and of the
      arrays of masks, biases and scores that have it. A plain function as the
      score or in `masks.where` may not capture arrays with this axis or read
      it, for instance to count heads; a score declares arrays by
      `attention.scores.SCALAR`, `VECTOR` or `MATRIX`.

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
  batch: tuple[str, ...] = ()

  def __post_init__(self):
    if isinstance(self.batch, str | list):
      names = [self.batch] if isinstance(self.batch, str) else self.batch
      object.__setattr__(self, "batch", tuple(names))
    names = [*self.batch, *filter(None, (self.heads, self.sequence))]
    if len({*names}) < len(names):
      raise ValueError(f"a mesh axis can shard one axis only, got {self}")

  @property
  def num_head_shards(self) -> int:
    """The number of devices over which heads are sharded."""
    return _axis_size(self.heads)

  @property
  def num_batch_shards(self) -> int:
    """The number of devices over which examples are sharded."""
    return math.prod(map(_axis_size, self.batch))

  @property
  def ring_size(self) -> int:
    """The number of devices over which tokens are sharded."""
    return _axis_size(self.sequence)

  @property
  def num_shards(self) -> int:
    """The number of devices over which attention is sharded."""
    return self.num_head_shards * self.ring_size * self.num_batch_shards

  @property
  def names(self) -> set[str]:
    """The mesh axes that shard attention, and those of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = {name for name, size in mesh.shape.items() if size == 1}
    own = {*self.batch, self.heads, self.sequence}
    return {name for name in own if name} | alone

  @property
  def length_multiple(self) -> int:
    """What the number of tokens must be a multiple of."""
    return self.ring_size * num_chunks(self.order)

  def positions(self, length: int) -> jax.Array:
    """int32 [length]: the position in the sequence of each token."""
    places = jnp.arange(length)
    if self.ring_size == 1:
      return places
    return arrange(places, self.ring_size, axis=0, order=self.order)


def as_mesh_axes(mesh_axes: Any) -> MeshAxes:
  """The axes; None shards nothing. TypeError for others."""
  if not isinstance(mesh_axes, MeshAxes | None):
    raise TypeError(f"mesh_axes must be MeshAxes, got {mesh_axes!r}")
  return mesh_axes or MeshAxes()


def attend_sharded_heads(
  mesh_axes: MeshAxes,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  score: Score,
  normalizer: Normalizer,
  implementation: ImplementationLike,
  **options: Any,  # mask, bias and dropout
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
  if mesh_axes.num_shards == 1:
    return compute(
      query, key, value, score=score, normalizer=normalizer, **options
    )[0]
  num_heads = query.shape[-3]
  _check_heads(mesh_axes, num_heads, key.shape[-3], value.shape[-3])
  if mesh_axes.num_head_shards > 1:
    _check_functions(mesh_axes, score, normalizer, query, key)
  examples = Examples.of(
    mesh_axes.batch, mesh_axes.num_batch_shards, query, key, value
  )
  arrays, specs, restored = _sharded_parameters(
    mesh_axes, examples, score, normalizer
  )

  def compute_shard(tokens, arrays, options):
    first_head: int | jax.Array = 0
    if options["dropout"] is not None:
      options["dropout"] = examples.dropout(options["dropout"])
    if mesh_axes.heads:
      size = num_heads // mesh_axes.num_head_shards
      is_grouped = tokens[-1].shape[-3] < size
      index = jax.lax.axis_index(mesh_axes.heads)
      first_head = index * size
      options = _of_shard(index, size, num_heads, is_grouped, **options)
    score, normalizer = restored(arrays)
    score = score.placed(first_head=first_head)
    context, _ = compute(*tokens, score=score, normalizer=normalizer, **options)
    examples.check_context(context)
    return context

  tokens, token_specs = _sharded_heads(
    mesh_axes,
    examples.axis,
    (query, key, value),
    (-3, -3, -3),
    [examples.has(each) for each in (query, key, value)],
    mesh_axes.sequence,
  )
  options, option_specs = examples.options(**options)
  return jax.shard_map(
    compute_shard,
    in_specs=(token_specs, specs, option_specs),
    out_specs=examples.spec_of_context(mesh_axes.heads, mesh_axes.sequence),
    axis_names=mesh_axes.names,
    # JAX cannot check the axes over which results of GPU kernels vary.
    check_vma=not (mesh_axes.batch and is_on_gpu()),
  )(tokens, arrays, options)


def _sharded_parameters(
  mesh_axes: MeshAxes, examples: Examples, score: Score, normalizer: Normalizer
) -> tuple[list[jax.Array], list[PartitionSpec], Callable]:
  """The arrays of a score and a normalizer, their shardings, and both again."""
  parameters = StaticZeros((score, normalizer))
  leaves, structure = jax.tree.flatten(parameters)
  heads, have_examples = (
    itertools.compress(
      [*of_owner(score), *of_owner(normalizer)], parameters.is_traced
    )
    for of_owner in (head_axes, examples.of_owner)
  )
  arrays, specs = _sharded_heads(
    mesh_axes, examples.axis, leaves, heads, have_examples
  )
  return arrays, specs, lambda own: jax.tree.unflatten(structure, own).tree


def _sharded_heads(
  mesh_axes: MeshAxes, examples, arrays, axes, have_examples, sequence=None
):
  """Arrays and their shardings; heads that devices share are repeated."""
  # `examples` are the mesh axes of the first axis of some arrays.
  count, repeated, specs = mesh_axes.num_head_shards, [], []
  for array, axis, has_examples in zip(arrays, axes, have_examples):
    names: list[Any] = [None] * jnp.ndim(array)
    if has_examples:
      names[0] = examples
    if sequence is not None:
      names[-2] = sequence
    if axis is not None:
      names[axis] = mesh_axes.heads
      if array.shape[axis] % count:
        array = jnp.repeat(array, count // array.shape[axis], axis=axis)
    repeated.append(array)
    specs.append(PartitionSpec(*names))
  return repeated, specs


def _of_shard(index, size, num_heads, is_grouped, *, mask, bias, dropout):
  """The mask, the bias and the dropout of a shard of `size` query heads."""
  own = index * size, size, num_heads
  if mask is not None:
    mask = mask.of_heads(*own)
  if bias is not None:
    bias = bias.of_heads(*own)
  if dropout is not None:
    axis = -2 if is_grouped else -1  # heads are [K, G] or [H]
    dropout = GroupDropout(dropout, index, num_heads // size, axis)
  return {"mask": mask, "bias": bias, "dropout": dropout}


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


def _check_functions(
  mesh_axes: MeshAxes, score: Score, normalizer: Normalizer, query, key
):
  """Raises if a plain function would depend on the heads of a device."""
  heads = query.shape[-3]
  key_shape = (*key.shape[:-3], heads, *key.shape[-2:])
  keys = jax.ShapeDtypeStruct(key_shape, key.dtype)
  queries = jax.eval_shape(score.map_query, query)
  shape = (*query.shape[:-1], key.shape[-2])
  follows = {"score": functions_follow_heads(score, queries, keys)}
  if isinstance(normalizer, FunctionNormalizer):
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    axes = {len(shape) - 3}
    follows["normalizer"] = follows_leading(normalizer, shape, dtype, axes)
  for name, is_same in follows.items():
    if not is_same:
      raise NotImplementedError(
        f"{name} is a function that combines or counts heads, or has an array "
        f"with an entry for each, and mesh_axes.heads={mesh_axes.heads!r} "
        "shards heads; declare arrays of heads by attention.scores.SCALAR, "
        "VECTOR or MATRIX, and read the index of a head by scores.modified("
        "..., with_indices=True)"
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
