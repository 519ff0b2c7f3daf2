"""Parameters rounded before a loop instead of in each of its steps.

A model that computes in bfloat16 rounds its float32 parameters where it uses
them. XLA does not move this out of the loop of a search, where it takes more
time and memory traffic than the products of a few tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from attention.transforms.dependence import num_carry

# Operations that move numbers, and those that call functions of all their
# arguments, with the first argument that these receive.
_MOVES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
_CALLS = {
  "jit": 0, "pjit": 0, "closed_call": 0, "custom_jvp_call": 0, "scan": 0,
  "checkpoint": 0, "remat2": 0, "cond": 1,
}  # fmt: skip


def rounded(function: Callable, params: Any, *arguments: Any) -> Any:
  """The parameters, in the dtype to which a function rounds all of their uses.

  Parameters with other uses are returned as they are, so the results of
  function(params, *arguments) stay the same.
  """
  leaves, structure = jax.tree.flatten(params)
  jaxpr = jax.make_jaxpr(function)(params, *arguments).jaxpr
  return jax.tree.unflatten(
    structure,
    [
      _rounded(leaf, set(_uses(jaxpr, variable)))
      for leaf, variable in zip(leaves, jaxpr.invars)
    ],
  )


def _rounded(leaf: Any, uses: set[Any]) -> Any:
  if len(uses) != 1 or None in uses:
    return leaf
  (dtype,) = uses
  is_smaller = jnp.issubdtype(dtype, jnp.floating) and (
    dtype.itemsize < leaf.dtype.itemsize
  )
  return leaf.astype(dtype) if is_smaller else leaf


def _uses(jaxpr: Jaxpr, variable: Any) -> Iterator[Any]:
  """The dtypes to which a variable is rounded; None for other uses."""
  if any(each is variable for each in jaxpr.outvars):
    yield None
  for equation in jaxpr.eqns:
    for place, operand in enumerate(equation.invars):
      if operand is variable:
        yield from _uses_in(jaxpr, equation, place)


def _uses_in(jaxpr: Jaxpr, equation: Any, place: int) -> Iterator[Any]:
  name = equation.primitive.name
  if name == "convert_element_type":
    yield equation.params["new_dtype"]
  elif name in _MOVES:
    yield from _uses(jaxpr, equation.outvars[0])
  elif (
    name in _CALLS and place >= _CALLS[name] and not _is_carry(equation, place)
  ):
    for called in _called(equation):
      yield from _uses(called, called.invars[place - _CALLS[name]])
  else:
    yield None


def _is_carry(equation: Any, place: int) -> bool:
  """Whether it is the first carry of a scan, whose dtype is the last one's."""
  if equation.primitive.name != "scan":
    return False
  # Arrays over which it loops, the last ones, have another shape inside.
  called: Any = _called(equation)[0]
  num_arrays = sum(
    own.aval.shape != inner.aval.shape
    for own, inner in zip(equation.invars, called.invars)
  )
  stop = len(equation.invars) - num_arrays
  return stop - num_carry(equation) <= place < stop


def _called(equation: Any) -> list[Jaxpr]:
  parameters = equation.params
  functions = parameters.get("branches") or [
    parameters.get("jaxpr", parameters.get("call_jaxpr"))
  ]
  return [
    each.jaxpr if isinstance(each, ClosedJaxpr) else each for each in functions
  ]
