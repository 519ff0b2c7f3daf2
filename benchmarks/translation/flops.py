"""Floating-point operations of the matrix products in a jaxpr."""

import math

from jax.extend.core import jaxprs_in_params


def product_flops(jaxpr) -> float:
  """Counts them as executed, loops included: 2 for each multiply-add."""
  total = 0.0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      left = equation.invars[0].aval.shape
      inner = math.prod(left[axis] for axis in contracted)
      total += 2.0 * inner * math.prod(equation.outvars[0].aval.shape)
    repeats = equation.params.get("length", 1)
    for inside in jaxprs_in_params(equation.params):
      total += repeats * product_flops(inside)
  return total
