"""The sharding of each array: which mesh axes shard which array axes."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention import ring
from attention.modules import MeshAxes
from experiments.distributed.mesh import ROWS

# Mesh axes of parameters, by a regular expression for the end of their path.
# The first match applies, also to the parameter's optimizer state and moving
# average. An array axis that the mesh axis does not divide is replicated.
# Axes of arrays: D model, H heads, F feed-forward, V vocabulary.
PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  ("(query|key|value)_projection/kernel", ("fsdp", "tensor", None)),  # D H D/H
  ("(query|key|value)_projection/bias", ("tensor", None)),  # H D/H
  ("output_projection/kernel", ("tensor", None, "fsdp")),  # H D/H D
  ("(self|cross)_attention/learned_score/.*", ("tensor",)),  # H
  ("feed_forward/Dense_0/kernel", ("fsdp", "tensor")),  # D F
  ("feed_forward/Dense_0/bias", ("tensor",)),  # F
  ("feed_forward/Dense_1/kernel", ("tensor", "fsdp")),  # F D
  ("(source_)?embedding/embedding", ("tensor", "fsdp")),  # V D
  ("output/kernel", ("fsdp", "tensor")),  # D V
  ("output/bias", ("tensor",)),  # V
  ("(kernel|input|recurrent|query_weight|key_weight)", ("fsdp", None)),
  (".*", ()),
)

# Attention that no mesh axis shards.
ALONE = MeshAxes()


def constrain(activations: jax.Array) -> jax.Array:  # [B, T, D]
  """Shards the rows and tokens of activations over the mesh that is set."""
  mesh = jax.sharding.get_abstract_mesh()
  # Inside jax.shard_map the axes are manual.
  if mesh.empty or mesh.size == 1 or not mesh.are_all_axes_auto:
    return activations
  spec = PartitionSpec(ROWS, "sequence", None)
  return jax.lax.with_sharding_constraint(activations, spec)


def gathered(kernel: jax.Array) -> jax.Array:  # [D, V]
  """Replicates the features of a kernel over the mesh that is set."""
  spec = PartitionSpec(None, PartitionSpec.UNCONSTRAINED)
  return jax.lax.with_sharding_constraint(kernel, spec)


def num_shards(*axes: str) -> int:
  """Returns the number of shards over axes of the mesh that is set."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def mesh_axes(mesh: Mesh, *, with_rows: bool = False) -> MeshAxes:
  """Returns the mesh axes that shard attention over several devices.

  Without `with_rows`, XLA shards its rows.
  """
  heads, sequence = (
    axis if mesh.shape[axis] > 1 else None for axis in ("tensor", "sequence")
  )
  batch = ROWS if with_rows and mesh.size > 1 else ()
  if heads is None and sequence is None and not batch:
    return ALONE
  return MeshAxes(heads, sequence, "zigzag", batch)


def ring_order(tokens: jax.Array, axes: MeshAxes) -> jax.Array:
  """Permutes tokens [B, T] to the order in which `axes` shards sequences."""
  if axes.ring_size == 1:
    return tokens
  return ring.arrange(tokens, axes.ring_size, axis=1, order=axes.order)


def sequence_order(tokens: jax.Array, axes: MeshAxes) -> jax.Array:
  """Undoes `ring_order`."""
  if axes.ring_size == 1:
    return tokens
  return ring.restore(tokens, axes.ring_size, axis=1, order=axes.order)


def path_name(path) -> str:
  """Returns the path of a pytree leaf, such as "params/output/bias"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def sharding_of(path: str, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array of a training state, by its path."""
  axes = dict(PARAMETERS)[_rule(path)]
  if len(axes) > len(shape):  # Adafactor keeps sums over axes
    axes = ()
  spec = [
    axis if axis and size % mesh.shape[axis] == 0 else None
    for axis, size in zip(axes, shape)
  ]
  return NamedSharding(mesh, PartitionSpec(*spec))


def sharded(state: Any, mesh: Mesh) -> Any:
  """Returns an abstract training state with the shardings of its arrays."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf.update(
      sharding=sharding_of(path_name(path), leaf.shape, mesh)
    ),
    state,
  )


def describe(state: Any, mesh: Mesh) -> list[str]:
  """Returns a table of shardings and memory; one line for a single device."""
  params = _sizes(state.params, mesh)
  others = _sizes((state.opt_state, state.average), mesh)
  totals = {
    ("parameters", ""): sum(params.values(), np.zeros(2)),
    ("optimizer state", ""): sum(others.values(), np.zeros(2)),
  }
  if mesh.size == 1:
    parts = [f"{name} {size[0]:.1f} MiB" for (name, _), size in totals.items()]
    return [", ".join(parts)]
  shape = ", ".join(f"{name} {n}" for name, n in mesh.shape.items() if n > 1)
  width = max(len(name) for name, _ in params)
  return [
    f"{mesh.size} devices: {shape}",
    f"{'':<{width}}  {'axes':<24}{'MiB':>10}{'per device':>12}",
    *(
      f"{name:<{width}}  {axes:<24}{total:>10.2f}{share:>12.2f}"
      for (name, axes), (total, share) in {**params, **totals}.items()
    ),
  ]


def _sizes(tree: Any, mesh: Mesh) -> dict[tuple[str, str], np.ndarray]:
  """Returns MiB in all and per device, by rule and mesh axes."""
  sizes: dict[tuple[str, str], np.ndarray] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = path_name(path)
    layout = sharding_of(name, leaf.shape, mesh)
    used = [a if a and mesh.shape[a] > 1 else "-" for a in layout.spec]
    row = _rule(name), ", ".join(used) if set(used) - {"-"} else "replicated"
    counts = leaf.size, math.prod(layout.shard_shape(leaf.shape))
    mebibytes = np.array(counts) * leaf.dtype.itemsize / 2**20
    sizes[row] = sizes.get(row, np.zeros(2)) + mebibytes
  return sizes


def _rule(path: str) -> str:
  """Returns the first rule that matches a path."""
  return next(
    rule for rule, _ in PARAMETERS if re.search(f"(^|/){rule}$", path)
  )
