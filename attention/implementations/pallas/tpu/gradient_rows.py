"""Numbers of rows in the gradient kernels for TPUs.

The kernel of queries makes them from the results of the forward kernel and
their cotangents, and writes them for the kernel of keys.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.pallas.tpu.tokens import read
from attention.implementations.pallas.tpu.visit import as_column, as_row

# Weights are exp(score - maximum) * inverse. The mean is that of the cotangents
# of a row's weights. With a mask, "row_flags" is 1 for rows whose context has
# NaN.
_NAMES = ("maximum", "inverse", "mean")


class Rows(NamedTuple):
  """Numbers [t, 1] of queries, and the cotangents of their contexts [t, E]."""

  maximum: jax.Array
  inverse: jax.Array
  mean: jax.Array
  cotangent: jax.Array

  def of(self, chunk: slice) -> "Rows":
    """Those of some of the queries."""
    return Rows(*(each[chunk, :] for each in self))


def names(is_masked: bool) -> tuple[str, ...]:
  """The arrays that the kernel of queries writes."""
  return (*_NAMES, "row_flags") if is_masked else _NAMES


def _made_rows(problem: Any, refs: dict[str, Any]) -> list[jax.Array]:
  """The numbers [t, 1] of `names`."""
  dtype = problem.dtype
  maximum, total = (as_column(refs[name][...]) for name in ("maximum", "total"))
  context, cotangent = (
    read(refs[name]).astype(dtype) for name in ("context", "cotangent")
  )
  products = context * cotangent
  is_nan = jnp.isnan(context)
  if problem.is_masked:  # what is NaN has no derivatives
    products = jnp.where(is_nan, 0.0, products)
  mean = jnp.sum(products, axis=-1, keepdims=True)
  if "of_total" in refs:
    of_total = as_column(refs["of_total"][...]) * total
    if problem.is_masked:
      of_total = jnp.where(jnp.isnan(total), 0.0, of_total)
    mean = mean - of_total
  # A row without keys has the factor 0. With a mask a row of NaN has it too.
  has_weights = total > 0.0 if problem.is_masked else total != 0.0
  rows = [
    jnp.where(has_weights, maximum, 0.0),
    jnp.where(has_weights, 1.0 / total, 0.0),
    mean,
  ]
  if problem.is_masked:
    row_flags = jnp.where(is_nan, 1.0, 0.0).astype(dtype)
    rows.append(jnp.max(row_flags, axis=-1, keepdims=True))
  return rows


def write_rows(
  problem: Any, refs: dict[str, Any], results: Sequence[Any], scratch: Any
) -> None:
  """Writes the numbers of the queries, and keeps them as columns."""
  for n, (numbers, result) in enumerate(
    zip(_made_rows(problem, refs), results, strict=True)
  ):
    result[...] = as_row(numbers)
    scratch[:, n : n + 1] = numbers


def of_scratch(scratch: Any, cotangent: jax.Array) -> Rows:
  """The rows that `write_rows` kept."""
  numbers = [scratch[:, n : n + 1] for n in range(scratch.shape[-1])]
  return _cleaned(numbers, cotangent)


def of_results(refs: Sequence[Any], cotangent: jax.Array) -> Rows:
  """The rows that the kernel of queries wrote."""
  return _cleaned([as_column(each[...]) for each in refs], cotangent)


def _cleaned(numbers: Sequence[jax.Array], cotangent: jax.Array) -> Rows:
  """Without the cotangents of contexts that are NaN."""
  maximum, inverse, mean, *row_flags = numbers
  if row_flags:  # masks of 16 bits would need another layout
    wide = cotangent.astype(mean.dtype)
    wide = jnp.where(row_flags[0] > 0.0, 0.0, wide)
    cotangent = wide.astype(cotangent.dtype)
  return Rows(maximum, inverse, mean, cotangent)
