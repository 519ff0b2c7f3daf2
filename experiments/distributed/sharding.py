"""The sharding of each array: which mesh axes shard which array axes.

Letters are axes of arrays: D model, H heads, F feed-forward, V vocabulary.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from attention import ring
from attention.modules import MeshAxes
from experiments.distributed.mesh import ROWS

# Mesh axes of parameters, by the end of their path; the first rule that matches
# applies. The optimizer state and the moving average of a parameter have its
# sharding. An axis that does not divide is replicated.
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

# Attention without a mesh of its own.
ALONE = MeshAxes()

# Mesh axes of activations, by the name of the array axis.
ACTIVATIONS: dict[str, str | tuple[str, ...] | None] = {
  "rows": ROWS,
  "tokens": "sequence",
  "features": None,
}


def constrain(array: jax.Array, *names: str) -> jax.Array:
  """Constrains the sharding of an activation to the mesh that is set.

  Args:
    array: the activation.
    *names: of its axes, keys of `ACTIVATIONS`.

  Returns:
    The array; unconstrained without a mesh and inside `jax.shard_map`.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or not mesh.are_all_axes_auto:
    return array
  spec = PartitionSpec(*(ACTIVATIONS[name] for name in names))
  return jax.lax.with_sharding_constraint(array, spec)


def num_shards(name: str) -> int:
  """Returns the number of shards of an activation axis on the current mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  axes = ACTIVATIONS[name] or ()
  names = (axes,) if isinstance(axes, str) else axes
  return math.prod(mesh.shape.get(axis, 1) for axis in names)


def mesh_axes(mesh: Mesh) -> MeshAxes:
  """Returns the mesh axes of more than one device that shard attention."""
  heads, sequence = (
    axis if mesh.shape[axis] > 1 else None for axis in ("tensor", "sequence")
  )
  if heads is None and sequence is None:
    return ALONE
  return MeshAxes(heads=heads, sequence=sequence, order="zigzag")


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
  """Returns the path of a pytree leaf, with slashes between its names."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def sharding_of(
  path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> NamedSharding:
  """Returns the sharding of an array of a training state, by its path."""
  axes = dict(PARAMETERS)[_rule(path)]
  if len(axes) > len(shape):  # Adafactor keeps sums over axes
    axes = ()
  spec = [
    axis if axis and size % mesh.shape[axis] == 0 else None
    for axis, size in zip(axes, shape)
  ]
  return NamedSharding(mesh, PartitionSpec(*spec))


def state_shardings(state: Any, mesh: Mesh | AbstractMesh) -> Any:
  """Returns the sharding of each array of a training state."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: sharding_of(path_name(path), leaf.shape, mesh), state
  )


class _Line(NamedTuple):
  """Arrays of one rule and sharding; sizes in MiB, in all and per device."""

  name: str
  axes: str
  whole: float
  share: float


def describe(state: Any, mesh: Mesh) -> list[str]:
  """Describes the sharding of a state and its memory per device.

  Args:
    state: a `TrainState`, of arrays or of their shapes.
    mesh: from `make_mesh`.

  Returns:
    Lines of a table; a single line with one device.
  """
  parameters = _lines(state.params, mesh)
  others = _lines((state.opt_state, state.average), mesh)
  totals = [_total("parameters", parameters), _total("optimizer state", others)]
  if mesh.size == 1:
    return [", ".join(f"{each.name} {each.whole:.1f} MiB" for each in totals)]
  shape = ", ".join(f"{name} {n}" for name, n in mesh.shape.items() if n > 1)
  width = max(len(each.name) for each in [*parameters, *totals])
  lines = [
    f"{mesh.size} devices: {shape}",
    f"{'':<{width}}  {'axes':<24}{'MiB':>10}{'per device':>12}",
  ]
  for each in [*parameters, *totals]:
    lines.append(
      f"{each.name:<{width}}  {each.axes:<24}{each.whole:>10.2f}"
      f"{each.share:>12.2f}"
    )
  return lines


def _lines(tree: Any, mesh: Mesh) -> list[_Line]:
  """Returns a line for each rule and sharding."""
  sizes: dict[tuple[str, str], list[float]] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = path_name(path)
    sharding = sharding_of(name, leaf.shape, mesh)
    sharded = [axis and mesh.shape[axis] > 1 and axis for axis in sharding.spec]
    axes = ", ".join(axis or "-" for axis in sharded)
    axes = axes if any(sharded) else "replicated"
    size = sizes.setdefault((_rule(name), axes), [0.0, 0.0])
    mebibytes = leaf.dtype.itemsize / 2**20
    size[0] += mebibytes * math.prod(leaf.shape)
    size[1] += mebibytes * math.prod(sharding.shard_shape(leaf.shape))
  lines = [_Line(*names, *size) for names, size in sizes.items()]
  rules = [rule for rule, _ in PARAMETERS]
  lines.sort(key=lambda line: rules.index(line.name))
  return [
    line._replace(name="all else") if line.name == ".*" else line
    for line in lines
  ]


def _total(name: str, lines: Sequence[_Line]) -> _Line:
  whole, share = (line.whole for line in lines), (line.share for line in lines)
  return _Line(name, "", sum(whole), sum(share))


def _rule(path: str) -> str:
  """Returns the first rule that matches a path."""
  return next(
    rule for rule, _ in PARAMETERS if re.search(f"(^|/){rule}$", path)
  )
