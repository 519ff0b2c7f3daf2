"""Where arrays live: a mesh of devices, and what is split over which axis."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.errors import UserError

BATCH_AXIS = "data"

T = TypeVar("T")


def make_mesh(data: int) -> Mesh:
  """Makes the device mesh of a run.

  Args:
    data: number of devices that share a batch, or -1 for all.

  Returns:
    A mesh with the axis "data".

  Raises:
    UserError: if more devices are asked for than there are, or so few that a
      process has none.

  Example:
    >>> make_mesh(1).shape["data"]
    1
  """
  available = jax.device_count()
  if data > available:
    raise UserError(
      f"config.mesh.data: {data} devices asked for, but there are {available}"
      f" ({jax.devices()[0].platform}); use at most {available}, or -1 for all"
    )
  size = available if data == -1 else data
  owners = Counter(device.process_index for device in jax.devices()[:size])
  if len(owners) < jax.process_count() or len(set(owners.values())) > 1:
    raise UserError(
      f"config.mesh.data: {size} devices do not divide evenly over the"
      f" {jax.process_count()} processes; use -1 for all"
    )
  return jax.make_mesh(
    (size,),
    (BATCH_AXIS,),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:size],
  )


def check_batch(mesh: Mesh, batch_size: int, accumulation: int) -> None:
  """Checks that every device gets the same share of every part of a batch.

  Args:
    mesh: from `make_mesh`.
    batch_size: examples of an update.
    accumulation: parts of an update.

  Raises:
    UserError: if a part does not divide over the devices.

  Example:
    >>> check_batch(make_mesh(1), batch_size=32, accumulation=2)
  """
  part, devices = batch_size // accumulation, mesh.shape[BATCH_AXIS]
  if part % devices:
    raise UserError(
      f"config.train.batch_size: {batch_size} in {accumulation} part(s) of"
      f" {part} does not divide over {devices} devices; use a multiple of"
      f" {devices * accumulation}, or set config.mesh.data"
    )


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the layout of what every device holds whole.

  Args:
    mesh: from `make_mesh`.

  Returns:
    A sharding that splits no axis.

  Example:
    >>> replicated(make_mesh(-1)).shard_shape((8, 3))
    (8, 3)
  """
  return NamedSharding(mesh, PartitionSpec())


def batched(mesh: Mesh) -> NamedSharding:
  """Returns the layout of a batch: its first axis over the devices.

  Args:
    mesh: from `make_mesh`.

  Returns:
    A sharding that splits the first axis.

  Example:
    >>> batched(make_mesh(1)).shard_shape((8, 3))
    (8, 3)
  """
  return NamedSharding(mesh, PartitionSpec(BATCH_AXIS))


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
    >>> double = each_its_rows(lambda params, x: params * x, make_mesh(1))
    >>> double(2, np.arange(4)).tolist()
    [0, 2, 4, 6]
  """
  rows = PartitionSpec(BATCH_AXIS)
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=(PartitionSpec(), rows),
    out_specs=rows,
    check_vma=False,
  )


def place(tree: Any, sharding: NamedSharding) -> Any:
  """Lays host arrays out over the devices.

  Args:
    tree: NumPy arrays, each process its share of the first axis.
    sharding: the layout.

  Returns:
    Global JAX arrays.

  Example:
    >>> placed = place(np.arange(4), batched(make_mesh(1)))
    >>> placed.shape
    (4,)
  """
  return jax.tree.map(
    lambda array: jax.make_array_from_process_local_data(sharding, array), tree
  )


def share(tree: Any) -> Any:
  """Returns this process's share of whole host arrays, for `place`.

  Args:
    tree: NumPy arrays, the same in every process; their first axis divides
      over the processes.

  Returns:
    The rows of this process.

  Example:
    >>> share(np.arange(4)).tolist()
    [0, 1, 2, 3]
  """
  process, count = jax.process_index(), jax.process_count()
  return jax.tree.map(lambda array: np.split(array, count)[process], tree)


def rounded_up(count: int, mesh: Mesh) -> int:
  """Returns the next number of rows that divides over the devices.

  Args:
    count: at least so many rows.
    mesh: from `make_mesh`.

  Returns:
    A multiple of the number of devices.

  Example:
    >>> rounded_up(5, make_mesh(1))
    5
  """
  devices = mesh.shape[BATCH_AXIS]
  return -(-count // devices) * devices


def first_process_first(make: Callable[[], T]) -> T:
  """Calls a function in every process, in the first one before the others.

  Args:
    make: leaves files that it finds again when it is called once more.

  Returns:
    What it returns.

  Example:
    >>> first_process_first(lambda: 3)
    3
  """
  if jax.process_count() == 1:
    return make()
  made = make() if jax.process_index() == 0 else None
  multihost_utils.sync_global_devices("the first process is done")
  return make() if made is None else made
