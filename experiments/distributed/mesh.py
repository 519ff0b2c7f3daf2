"""The devices of a run and the processes they belong to.

data      devices that share the rows of a batch
fsdp      likewise, and they share the parameters too
sequence  devices that share the tokens of each row
tensor    devices that share heads, hidden units and the vocabulary
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.config import MeshConfig
from experiments.data.dataset import BatchShard
from experiments.errors import UserError

# The last axis has the closest neighbours.
AXES = ("data", "fsdp", "sequence", "tensor")
# The axes over which the rows of a batch of training are divided.
ROWS = ("data", "fsdp")

T = TypeVar("T")


def make_mesh(config: MeshConfig) -> Mesh:
  """Makes the device mesh of a run.

  Args:
    config: `config.mesh`.

  Returns:
    A mesh with the axes `AXES`.

  Raises:
    UserError: if there are too few devices, or some processes would have more
      than others.

  Example:
    >>> make_mesh(MeshConfig.one()).axis_names
    ('data', 'fsdp', 'sequence', 'tensor')
  """
  available = jax.device_count()
  sizes = {name: getattr(config, name) for name in AXES}
  given = math.prod(size for size in sizes.values() if size > 0)
  shape = {
    name: max(available // given, 1) if size == -1 else size
    for name, size in sizes.items()
  }
  size = math.prod(shape.values())
  if -1 in sizes.values() and size < available:
    others = [f"{name} {n}" for name, n in sizes.items() if n > 1]
    raise UserError(
      f"config.mesh: {available} devices do not divide by {' x '.join(others)};"
      " say how many to use with config.mesh.data"
    )
  asked = " x ".join(f"{n} {name}" for name, n in shape.items() if n > 1)
  if size > available:
    raise UserError(
      f"config.mesh: {asked} are {size} devices, but there are {available}"
      f" ({jax.devices()[0].platform}); ask for at most {available}, or for all"
      " with data=-1"
    )
  owners = Counter(device.process_index for device in jax.devices()[:size])
  if len(owners) < jax.process_count() or len(set(owners.values())) > 1:
    raise UserError(
      f"config.mesh: {asked or 'one device'}, {size} in all, do not divide"
      f" evenly over the {jax.process_count()} processes; use data=-1 for all"
    )
  return jax.make_mesh(
    tuple(shape.values()),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=jax.devices()[:size],
  )


def num_parts(mesh: Mesh) -> int:
  """Returns into how many parts the rows of a training batch are divided.

  Args:
    mesh: from `make_mesh`.

  Returns:
    The product of the axes `ROWS`.

  Example:
    >>> num_parts(make_mesh(MeshConfig.one()))
    1
  """
  return math.prod(mesh.shape[name] for name in ROWS)


def check_batch(mesh: Mesh, batch_size: int, accumulation: int) -> None:
  """Checks that every device gets the same share of every part of a batch.

  Args:
    mesh: from `make_mesh`.
    batch_size: examples of an update.
    accumulation: parts of an update.

  Raises:
    UserError: if a part does not divide over the devices.

  Example:
    >>> check_batch(make_mesh(MeshConfig.one()), batch_size=32, accumulation=2)
  """
  part, devices = batch_size // accumulation, num_parts(mesh)
  if part % devices:
    raise UserError(
      f"config.train.batch_size: {batch_size} in {accumulation} part(s) of"
      f" {part} does not divide over {devices} devices; use a multiple of"
      f" {devices * accumulation}, or set config.mesh.data"
    )


def check_rows(mesh: Mesh, multiple: int, accumulation: int) -> None:
  """Checks that every device gets the same share of batches of text.

  Args:
    mesh: from `make_mesh`.
    multiple: of rows, `config.train.row_multiple`.
    accumulation: parts of an update.

  Raises:
    UserError: if it does not divide over devices and parts.

  Example:
    >>> check_rows(make_mesh(MeshConfig.one()), multiple=8, accumulation=2)
  """
  needed = num_parts(mesh) * accumulation
  if multiple % needed:
    raise UserError(
      f"config.train.row_multiple: {multiple} rows do not divide over"
      f" {num_parts(mesh)} devices in {accumulation} part(s); use a multiple of"
      f" {needed} (which changes the batches), or fewer devices of"
      " config.mesh.data and fsdp"
    )


def batch_shard(mesh: Mesh) -> BatchShard:
  """Returns which rows of a training batch this process has to make.

  Args:
    mesh: from `make_mesh`.

  Returns:
    The parts that its devices hold. Processes whose devices share tokens or
    heads make the same ones.

  Example:
    >>> batch_shard(make_mesh(MeshConfig.one()))
    BatchShard(indices=(0,), num_shards=1)
  """
  count = num_parts(mesh)
  parts = {
    part
    for part, devices in enumerate(mesh.devices.reshape(count, -1))
    if any(each.process_index == jax.process_index() for each in devices)
  }
  return BatchShard(tuple(sorted(parts)), count)


def place_rows(tree: Any, mesh: Mesh) -> Any:
  """Lays a training batch out over the devices.

  Args:
    tree: NumPy arrays, of each the `rows` of this process.
    mesh: from `make_mesh`.

  Returns:
    Global arrays, divided by rows.

  Example:
    >>> import numpy as np
    >>> place_rows(np.arange(4), make_mesh(MeshConfig.one())).shape
    (4,)
  """
  mine, count = batch_shard(mesh)
  layout = NamedSharding(mesh, PartitionSpec(ROWS))

  def place(array):
    size = len(array) // len(mine)

    def part(index):
      first = mine.index((index[0].start or 0) // size) * size
      return array[first : first + size]

    shape = (count * size, *array.shape[1:])
    return jax.make_array_from_callback(shape, layout, part)

  return jax.tree.map(place, tree)


def place_whole(tree: Any, mesh: Mesh) -> Any:
  """Divides whole host arrays by rows over all devices.

  Args:
    tree: NumPy arrays, the same in every process, whose first axis divides
      over the devices.
    mesh: from `make_mesh`.

  Returns:
    Global arrays.

  Example:
    >>> import numpy as np
    >>> place_whole(np.arange(4), make_mesh(MeshConfig.one())).shape
    (4,)
  """
  layout = NamedSharding(mesh, PartitionSpec(AXES))

  def place(array):
    return jax.make_array_from_callback(array.shape, layout, array.__getitem__)

  return jax.tree.map(place, tree)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the layout of what every device holds whole.

  Args:
    mesh: from `make_mesh`.

  Returns:
    A sharding that splits no axis.

  Example:
    >>> replicated(make_mesh(MeshConfig.one())).shard_shape((8, 3))
    (8, 3)
  """
  return NamedSharding(mesh, PartitionSpec())


def gathered(tree: Any, mesh: Mesh) -> Any:
  """Gives every device the whole of arrays.

  Args:
    tree: arrays in any layout on the mesh.
    mesh: from `make_mesh`.

  Returns:
    The same values, replicated.

  Example:
    >>> import numpy as np
    >>> whole = gathered({"w": np.ones(2)}, make_mesh(MeshConfig.one()))
    >>> whole["w"].is_fully_replicated
    True
  """
  return _gather(replicated(mesh))(tree)


@functools.cache
def _gather(layout: NamedSharding) -> Callable[[Any], Any]:
  return jax.jit(lambda tree: tree, out_shardings=layout)


def each_its_rows(function: Callable[..., T], mesh: Mesh) -> Callable[..., T]:
  """Has every device run a function on its own rows, and on nothing else's.

  Where rows never meet, this keeps XLA from gathering them.

  Args:
    function: (params, batch) -> arrays that have a row an example, as the
      batch has.
    mesh: from `make_mesh`.

  Returns:
    The function of a whole batch.

  Example:
    >>> import numpy as np
    >>> one = make_mesh(MeshConfig.one())
    >>> double = each_its_rows(lambda params, x: params * x, one)
    >>> double(2, np.arange(4)).tolist()
    [0, 2, 4, 6]
  """
  rows = PartitionSpec(AXES)
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=(PartitionSpec(), rows),
    out_specs=rows,
    check_vma=False,
  )


def rounded_up(count: int, mesh: Mesh) -> int:
  """Returns the next number of rows that divides over all devices.

  Args:
    count: at least so many rows.
    mesh: from `make_mesh`.

  Returns:
    A multiple of the number of devices.

  Example:
    >>> rounded_up(5, make_mesh(MeshConfig.one()))
    5
  """
  return -(-count // mesh.size) * mesh.size
