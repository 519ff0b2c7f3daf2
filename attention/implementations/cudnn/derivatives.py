"""Derivatives of a small call with an lse, by the dense formula.

The kernel has no derivatives of the lse. With those of tiles, and the kernel's
own of the context, the gradient has more operations than the dense formula.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from attention.arrays.softmax import Statistics
from attention.implementations.closure import without_captured
from attention.implementations.reference import Reference
from attention.request import Request


def with_dense_derivatives(
  compute: Callable[[Request], tuple[jax.Array, Any]], request: Request
) -> tuple[jax.Array, Statistics]:
  """compute(request); a call that is differentiated is the dense formula."""
  dtype = request.query.dtype
  tokens = [*request.tokens]

  def traced(implementation: Callable[[Request], tuple[jax.Array, Any]]):
    def results(query, key, value):
      own = dataclasses.replace(request, query=query, key=key, value=value)
      context, rows = implementation(own)
      return context.astype(dtype), rows

    return without_captured(results, *tokens)

  (program, captured), (dense, of_dense) = traced(compute), traced(Reference())

  @jax.custom_jvp
  def result(tokens, captured, of_dense):
    del of_dense
    return program(captured, *tokens)

  @result.defjvp
  def rule(primals, tangents):
    def formula(tokens, captured, of_dense):
      del captured
      return dense(of_dense, *tokens)

    return jax.jvp(formula, primals, tangents)

  return result(tokens, captured, of_dense)
