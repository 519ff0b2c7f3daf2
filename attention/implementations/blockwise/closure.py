"""Functions, and apart from them the arrays that they capture."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def without_captured(
  function: Callable, *arguments: Any
) -> tuple[Callable, list[Any]]:
  """Makes captured arrays an argument.

  A custom derivative rule gives arguments gradients, whatever trace they
  belong to; of what its function captures it knows nothing.

  Args:
    function: of arrays.
    *arguments: such as it will be called with, or their shapes.

  Returns:
    (captured, *arguments) -> result, and what was captured.

  Example:
    >>> import jax.numpy as jnp
    >>> array = jnp.ones(2)
    >>> pure, captured = without_captured(lambda x: x * array, array)
    >>> pure([jnp.zeros(2)], array)
    Array([0., 0.], dtype=float32)
  """
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
  jaxpr, structure = closed.jaxpr, jax.tree.structure(shapes)

  def pure(captured, *arguments):
    leaves = jax.tree.leaves(arguments)
    results = jaxpr_as_fun(ClosedJaxpr(jaxpr, captured))(*leaves)
    return jax.tree.unflatten(structure, results)

  return pure, list(closed.consts)
