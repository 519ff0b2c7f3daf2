"""The device mesh of a run, and the sharding of batches."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.config import MeshConfig, TrainConfig
from experiments.data.batch import Batch, BatchShape
from experiments.data.dataset import BatchShard
from experiments.errors import UserError

# Neighbours along the last axis have the fastest connection.
AXES = ("data", "fsdp", "sequence", "tensor")
# The axes that shard the examples of a training batch.
ROWS = ("data", "fsdp")

T = TypeVar("T")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
  """Makes the mesh of all or the given devices, which must fit the config."""
  # Given devices need not exist.
  present = devices is None
  devices = jax.devices() if devices is None else devices
  available = len(devices)
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
      f"config.mesh: {available} devices are no multiple of"
      f" {' x '.join(others)}; set the number to use with config.mesh.data"
    )
  asked = " x ".join(f"{name}={n}" for name, n in shape.items() if n > 1)
  if size > available:
    raise UserError(
      f"config.mesh: {asked} needs {size} devices, but this run has {available}"
      f" ({devices[0].platform}); ask for at most {available}, or for all"
      " with data=-1"
    )
  owners = Counter(device.process_index for device in devices[:size])
  processes = jax.process_count() if present else len(owners)
  if len(owners) < processes or len(set(owners.values())) > 1:
    raise UserError(
      f"config.mesh: {asked or 'one device'}, {size} in all, do not divide"
      f" evenly over the {processes} processes; use data=-1 for all"
    )
  # An axis may be a part of an axis of the physical mesh, such as 4 of 16.
  placed = mesh_utils.create_device_mesh(
    tuple(shape.values()), devices[:size], allow_split_physical_axes=True
  )
  return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def platform(mesh: Mesh) -> str:
  """Returns the platform of the devices, such as "cpu"."""
  return mesh.devices.flat[0].platform


def num_batch_shards(mesh: Mesh) -> int:
  """Returns the number of shards of a training batch."""
  return math.prod(mesh.shape[name] for name in ROWS)


def check_batch(mesh: Mesh, config: TrainConfig) -> None:
  """Raises UserError unless batches divide evenly over the devices."""
  name = config.rows_field
  size, devices = getattr(config, name), num_batch_shards(mesh)
  needed = devices * config.accumulation
  if size % needed:
    raise UserError(
      f"config.train.{name}: {size} rows do not divide over {devices} devices"
      f" in {config.accumulation} part(s); use a multiple of {needed} (which"
      " changes the batches), or fewer devices of config.mesh.data and fsdp"
    )


def batch_shard(mesh: Mesh) -> BatchShard:
  """Returns the shards of a training batch that this process loads."""
  # Processes whose devices shard tokens or heads load the same examples.
  count = num_batch_shards(mesh)
  indices = (
    index
    for index, devices in enumerate(mesh.devices.reshape(count, -1))
    if any(each.process_index == jax.process_index() for each in devices)
  )
  return BatchShard(tuple(indices), count)


def shard_batch(tree: Any, mesh: Mesh) -> Any:
  """Makes global arrays of the NumPy arrays that each process has loaded."""
  indices, count = batch_shard(mesh)
  sharding = NamedSharding(mesh, PartitionSpec(ROWS))

  def place(array):
    size = len(array) // len(indices)

    def read(index):
      first = indices.index((index[0].start or 0) // size) * size
      return array[first : first + size]

    shape = (count * size, *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, read)

  return jax.tree.map(place, tree)


def abstract_batch(
  shape: BatchShape, mesh: Mesh, axes: Sequence[str] = ROWS
) -> Any:
  """Returns a `Batch` of `jax.ShapeDtypeStruct`, whose rows `axes` shard."""
  rows, *lengths = shape
  sharding = NamedSharding(mesh, PartitionSpec(tuple(axes)))
  tokens: list[Any] = [
    jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
    for length in lengths
  ]
  return Batch(*tokens)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
  """Shards NumPy arrays, equal in all processes, by rows over all devices."""
  sharding = NamedSharding(mesh, PartitionSpec(AXES))
  return jax.tree.map(lambda array: place(array, sharding), tree)


def place(array: np.ndarray, sharding: Any) -> jax.Array:
  """Puts an array that all processes have onto the devices."""
  read = array.__getitem__
  return jax.make_array_from_callback(array.shape, sharding, read)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that is replicated on every device."""
  return NamedSharding(mesh, PartitionSpec())


@functools.partial(jax.jit, static_argnums=1)
def all_gather(tree: Any, mesh: Mesh) -> Any:
  """Replicates arrays on every device."""
  return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def map_shards(function: Callable[..., T], mesh: Mesh) -> Callable[..., T]:
  """Maps a function (params, batch) over shards of rows, one per device."""
  rows = PartitionSpec(AXES)
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=(PartitionSpec(), rows),
    out_specs=rows,
    check_vma=False,
  )
