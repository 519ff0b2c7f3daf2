"""What lies where: which axes of the mesh share which axes of which arrays.

Letters are axes of arrays: D model, H heads, F feed-forward, V vocabulary.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from attention.modules import MeshAxes
from experiments.distributed.mesh import ROWS

# Of parameters, by the end of their path; the first rule that fits counts. The
# optimiser's state of a parameter, and its moving average, lie as it does. An
# axis that does not divide stays whole.
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

# One device, or as many as XLA is left to use.
ALONE = MeshAxes()

# Of activations, by the name of each of their axes.
ACTIVATIONS: dict[str, str | tuple[str, ...] | None] = {
  "rows": ROWS,
  "tokens": "sequence",
  "features": None,
}


def constrain(array: jax.Array, *names: str) -> jax.Array:
  """Tells XLA how an activation lies on the mesh that is set, if one is.

  Where each device runs on its own (`jax.shard_map`) there is nothing to tell.

  Args:
    array: the activation.
    *names: of its axes, of `ACTIVATIONS`.

  Returns:
    The array.

  Example:
    >>> import numpy as np
    >>> constrain(np.ones((2, 3, 4)), "rows", "tokens", "features").shape
    (2, 3, 4)
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or not mesh.are_all_axes_auto:
    return array
  spec = PartitionSpec(*(ACTIVATIONS[name] for name in names))
  return jax.lax.with_sharding_constraint(array, spec)


def parts(name: str) -> int:
  """Returns into how many parts the mesh that is set cuts an axis.

  Args:
    name: of `ACTIVATIONS`.

  Returns:
    1 where no mesh is set.

  Example:
    >>> parts("rows")
    1
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = ACTIVATIONS[name] or ()
  names = (axes,) if isinstance(axes, str) else axes
  return math.prod(mesh.shape.get(axis, 1) for axis in names)


def mesh_axes(mesh: Mesh) -> MeshAxes:
  """Returns the axes over which attention is shared.

  Args:
    mesh: from `make_mesh`.

  Returns:
    Those of more than one device.

  Example:
    >>> from experiments.distributed.mesh import make_mesh
    >>> from experiments.config import MeshConfig
    >>> one = make_mesh(MeshConfig.one())
    >>> mesh_axes(one)
    MeshAxes(heads=None, sequence=None, order='zigzag')
  """
  heads, sequence = (
    axis if mesh.shape[axis] > 1 else None for axis in ("tensor", "sequence")
  )
  return MeshAxes(heads=heads, sequence=sequence, order="zigzag")


def path_name(path) -> str:
  """Returns what an array of a state is called.

  Args:
    path: as `jax.tree_util` has it.

  Returns:
    Its names, with slashes between them.

  Example:
    >>> ((path, _),) = jax.tree_util.tree_leaves_with_path({"w": {"b": 1}})
    >>> path_name(path)
    'w/b'
  """
  return jax.tree_util.keystr(path, simple=True, separator="/")


def layout_of(
  path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> NamedSharding:
  """Returns how an array of a state lies on a mesh.

  Args:
    path: its names, with slashes between them.
    shape: its shape.
    mesh: from `make_mesh`.

  Returns:
    Its sharding.

  Example:
    >>> from experiments.distributed.mesh import make_mesh
    >>> from experiments.config import MeshConfig
    >>> one = make_mesh(MeshConfig.one())
    >>> layout_of("params/embedding/embedding", (8, 4), one).spec
    P('tensor', 'fsdp')
  """
  axes = dict(PARAMETERS)[_rule(path)]
  if len(axes) > len(shape):  # of an optimiser that keeps sums over axes
    axes = ()
  spec = [
    axis if axis and size % mesh.shape[axis] == 0 else None
    for axis, size in zip(axes, shape)
  ]
  return NamedSharding(mesh, PartitionSpec(*spec))


def layouts(state: Any, mesh: Mesh | AbstractMesh) -> Any:
  """Returns how each array of a state lies on a mesh.

  Args:
    state: a pytree of arrays or of their shapes.
    mesh: from `make_mesh`.

  Returns:
    The same pytree, of shardings.

  Example:
    >>> import numpy as np
    >>> from experiments.distributed.mesh import make_mesh
    >>> from experiments.config import MeshConfig
    >>> one = make_mesh(MeshConfig.one())
    >>> layouts({"step": np.int32(0)}, one)["step"].spec
    P()
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: layout_of(path_name(path), leaf.shape, mesh), state
  )


class _Line(NamedTuple):
  """A line of the table: some arrays, and their bytes in all and a device."""

  name: str
  axes: str
  whole: float
  share: float


def table(state: Any, mesh: Mesh) -> list[str]:
  """Says what lies where, and what it takes of each device.

  Args:
    state: a `TrainState`, of arrays or of their shapes.
    mesh: from `make_mesh`.

  Returns:
    Lines; a single one where there is one device.

  Example:
    >>> from experiments.distributed.mesh import make_mesh
    >>> from experiments.config import MeshConfig
    >>> from experiments.optimization.step import TrainState
    >>> state = TrainState(
    ...   jax.ShapeDtypeStruct((), "int32"),
    ...   {"w": jax.ShapeDtypeStruct((2**18,), "float32")}, (), None, None
    ... )
    >>> table(state, make_mesh(MeshConfig.one()))
    ['parameters 1.0 MiB, optimizer state 0.0 MiB']
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
    f"{'':<{width}}  {'axes':<24}       MiB  a device",
  ]
  for each in [*parameters, *totals]:
    lines.append(
      f"{each.name:<{width}}  {each.axes:<24}{each.whole:>10.2f}"
      f"{each.share:>10.2f}"
    )
  return lines


def _lines(tree: Any, mesh: Mesh) -> list[_Line]:
  """A line for each rule and layout."""
  sizes: dict[tuple[str, str], list[float]] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = path_name(path)
    layout = layout_of(name, leaf.shape, mesh)
    shared = [axis and mesh.shape[axis] > 1 and axis for axis in layout.spec]
    axes = ", ".join(axis or "-" for axis in shared) if any(shared) else "whole"
    size = sizes.setdefault((_rule(name), axes), [0.0, 0.0])
    numbers = leaf.dtype.itemsize / 2**20
    size[0] += numbers * math.prod(leaf.shape)
    size[1] += numbers * math.prod(layout.shard_shape(leaf.shape))
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
  """The first rule that fits."""
  return next(
    rule for rule, _ in PARAMETERS if re.search(f"(^|/){rule}$", path)
  )
