"""Meshes with explicit axes, where the type of an array says where it lies.

On these every operation has to say how its result is laid out. Here only the
results of attention do, which lie as its arguments; XLA lays out the rest.
"""

import functools
import inspect
import itertools
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


def on_any_mesh(*results: str) -> Callable[[_Function], _Function]:
  """Lets a function of tokens run on meshes with explicit axes.

  Args:
    *results: the last axes of each result, "TE" for a context [..., T, E]. T
      lies as the query's does, S as the key's, E as the value's features, and
      a leading axis as in the first of the three that divides it. Axes of
      other names are whole.

  Returns:
    A decorator of functions (query, key[, value], ...). It changes nothing
    where no array has explicit axes.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> @on_any_mesh("T")
    ... def first_feature(query, key):
    ...   return query.reshape(-1, 4)[:, 0].reshape(query.shape[:-1])
    >>> mesh = jax.make_mesh((1,), ("batch",))
    >>> place = jax.NamedSharding(mesh, jax.P("batch"))
    >>> tokens = jax.device_put(jnp.ones((2, 3, 4)), place)
    >>> jax.typeof(first_feature(tokens, tokens))
    ShapedArray(float32[2@batch,3])
  """

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
      laid_out = [
        jax.sharding.reshard(
          array, NamedSharding(mesh, _spec(tokens, names, array.ndim))
        )
        for names, array in zip(results, arrays)
      ]
      return jax.tree.unflatten(structure, laid_out)

    return run

  return decorate


def _explicit_mesh(leaf):
  """The mesh of an array if it has explicit axes, or None."""
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
  """How a result lies whose last axes are `names`."""
  lying = [_mesh_axes(array) for array in tokens]
  last = {"T": lying[0][-2], "S": lying[1][-2], "E": lying[-1][-1]}
  from_the_right = itertools.zip_longest(*(axes[-3::-1] for axes in lying))
  leading = [next(filter(None, axes), None) for axes in from_the_right]
  whole = [None] * (rank - len(names) - len(leading))
  spec = [*whole, *reversed(leading), *map(last.get, names)]
  return PartitionSpec(*_without_repeats(spec))


def _mesh_axes(array):
  """Which axes of the mesh divide each axis of an array."""
  if _explicit_mesh(array) is None:
    return [None] * np.ndim(array)
  return [*jax.typeof(array).sharding.spec]


def _without_repeats(spec):
  """A mesh axis divides one axis of an array only: here the first."""
  seen: set[str] = set()
  for names in spec:
    group = {names} if isinstance(names, str) else {*(names or ())}
    yield None if group & seen else names
    seen |= group
