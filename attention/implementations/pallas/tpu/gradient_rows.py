"""Numbers of rows in the gradient kernels for TPUs.

The kernel of queries makes them from the results of the forward kernel and
their cotangents, and writes them for the kernel of keys.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.pallas.gradient_rows import gradient_rows
from attention.implementations.pallas.tpu.tokens import read
from attention.implementations.pallas.tpu.visit import as_column, as_row

# See `GradientRows`. With a mask, "row_flags" is 1 for rows whose context has
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


def write_gradient_rows(
  problem, refs: dict[str, Any], results, scratch
) -> None:
  """Writes the numbers of the queries, and keeps them as columns."""
  statistics = (as_column(refs[name][...]) for name in ("maximum", "total"))
  tokens = (
    read(refs[name]).astype(problem.dtype) for name in ("context", "cotangent")
  )
  of_total = as_column(refs["of_total"][...]) if "of_total" in refs else None
  rows = gradient_rows(
    *statistics, *tokens, of_total=of_total, is_masked=problem.is_masked
  )
  found = (each for each in rows if each is not None)
  for n, (numbers, result) in enumerate(zip(found, results, strict=True)):
    result[...] = as_row(numbers)
    scratch[:, n : n + 1] = numbers


def of_scratch(scratch: Any, cotangent: jax.Array) -> Rows:
  """The rows that `write_gradient_rows` kept."""
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
