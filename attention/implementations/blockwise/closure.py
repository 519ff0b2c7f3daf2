"""Closures converted to functions of the arrays that they capture."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def without_captured(
  function: Callable, *arguments: Any
) -> tuple[Callable, list[Any]]:
  """Returns (captured, *arguments) -> result, and the captured arrays.

  A custom derivative rule needs this: it differentiates with respect to
  arguments only. `arguments` are arrays or `jax.ShapeDtypeStruct`s.
  """
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
  jaxpr, structure = closed.jaxpr, jax.tree.structure(shapes)

  def pure(captured, *arguments):
    leaves = jax.tree.leaves(arguments)
    results = jaxpr_as_fun(ClosedJaxpr(jaxpr, captured))(*leaves)
    return jax.tree.unflatten(structure, results)

  return pure, list(closed.consts)
