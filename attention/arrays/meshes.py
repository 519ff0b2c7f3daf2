"""Meshes with explicit axes, where an array's type includes its sharding."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_CAPTURED = (
  "A score that is a plain function cannot capture arrays of a mesh with "
  "explicit axes; make them arguments, attend(..., score=jax.tree_util."
  "Partial(function, array)), or attributes of an attention.scores.Score."
)
_TOKENS = ("query", "key", "value")
_Function = TypeVar("_Function", bound=Callable)


def on_any_mesh(
  *results: str,  # last axes of each result: "TE" for a context [..., T, E]
  like: str | None = None,  # the argument whose sharding further results get
) -> Callable[[_Function], _Function]:
  """Decorates functions of tokens to run on meshes with explicit axes."""

  def decorate(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
      leaves, structure = jax.tree.flatten((args, kwargs))
      mesh = next(filter(None, map(_explicit_mesh, leaves)), None)
      if mesh is None:
        return function(*args, **kwargs)
      given = inspect.signature(function).bind(*args, **kwargs).arguments
      tokens = [given[name] for name in _TOKENS if name in given]
      automatic = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
      with jax.sharding.use_abstract_mesh(mesh.update_axis_types(automatic)):
        args, kwargs = jax.tree.unflatten(
          structure, map(_in_automatic_mesh, leaves)
        )
        try:
          returned = function(*args, **kwargs)
        except ValueError as error:
          if "context mesh" in str(error):
            error.add_note(_CAPTURED)
          raise
      arrays, structure = jax.tree.flatten(returned)
      specs = [
        _spec(tokens, names, array.ndim)
        for names, array in zip(results, arrays)
      ]
      for array in jax.tree.leaves(given.get(like)) if like else ():
        specs.append(PartitionSpec(*_mesh_axes(array)))
      sharded = [
        jax.sharding.reshard(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs)
      ]
      return jax.tree.unflatten(structure, sharded)

    return run

  return decorate


def _explicit_mesh(leaf):
  """The mesh of an array if the mesh has explicit axes, or None."""
  if isinstance(leaf, jax.Array):
    mesh = jax.typeof(leaf).sharding.mesh
    if mesh.explicit_axes:
      return mesh
  return None


def _in_automatic_mesh(leaf):
  if _explicit_mesh(leaf) is None:
    return leaf
  return jax.sharding.reshard(leaf, PartitionSpec())


def _spec(tokens: Sequence[Any], names: str, rank: int) -> PartitionSpec:
  """The sharding of a result whose last axes are `names`."""
  # A leading axis is sharded as in the first of the arrays that shards it.
  specs = [_mesh_axes(array) for array in tokens]
  last = {"T": specs[0][-2], "S": specs[1][-2], "E": specs[-1][-1]}
  from_the_right = itertools.zip_longest(*(axes[-3::-1] for axes in specs))
  leading = [next(filter(None, axes), None) for axes in from_the_right]
  replicated = [None] * (rank - len(names) - len(leading))
  spec = [*replicated, *reversed(leading), *map(last.get, names)]
  return PartitionSpec(*_without_repeats(spec))


def _mesh_axes(array):
  """The mesh axes that shard each axis of an array."""
  if _explicit_mesh(array) is None:
    return [None] * np.ndim(array)
  return [*jax.typeof(array).sharding.spec]


def _without_repeats(spec):
  """Keeps the first use of each mesh axis, which can shard one axis only."""
  seen: set[str] = set()
  for names in spec:
    group = {names} if isinstance(names, str) else {*(names or ())}
    yield None if group & seen else names
    seen |= group


def num_automatic_devices() -> int:
  """The number of devices over which XLA may shard arrays of this trace."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1
  own = set(mesh.axis_names) - set(mesh.manual_axes)
  return math.prod(mesh.shape[name] for name in own)


def is_on_gpu() -> bool:
  """Whether the devices of the current mesh are known to be GPUs."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device is not None and device.platform == "gpu"


def is_on_accelerator() -> bool:
  """Whether the devices of the current mesh are known, and no CPUs."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device is not None and device.platform != "cpu"
