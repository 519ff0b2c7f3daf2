"""One visit of the gradient kernels for TPUs.

All compute scores and weights again, from the statistics of the rows. The
kernel of queries computes the gradients of queries and of arrays of the score,
the kernel of keys those of keys and values, and that of pairs the gradient of
an array with a number for each pair.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.tpu import gradient_rows
from attention.implementations.pallas.tpu.sums import Sums
from attention.implementations.pallas.tpu.tokens import read, write
from attention.implementations.pallas.visits import FIRST, LAST


def of_queries(
  problem: Any,
  wanted: Sequence[int],
  names: Sequence[str],
  visit: Any,
  inputs: Sequence[Any],
  outputs: Sequence[Any],
  scratch: Sequence[Any],
) -> None:
  """Adds the gradients of a tile of keys.

  `wanted` are operands, and `names` are those of the last inputs: the results
  of the forward kernel and their cotangents.
  """
  query_ref, key_ref, value_ref, *rest = inputs
  operand_refs, row_refs = rest[: -len(names)], rest[-len(names) :]
  rows_by_name = dict(zip(names, row_refs))
  summed, numbers, *sum_refs = scratch
  gradient_ref, *results = outputs
  of_operands, results = results[: len(wanted)], results[len(wanted) :]
  sums = Sums(problem.operands_of(wanted), of_operands, sum_refs)

  @pl.when(visit.has(FIRST))
  def _():
    summed[...] = jnp.zeros_like(summed)
    gradient_rows.write_rows(problem, rows_by_name, results, numbers)

  sums.start(visit)

  def update(masked):
    query, key, value = (
      problem.finite(read(ref)) for ref in (query_ref, key_ref, value_ref)
    )
    parts = visit.parts(problem, operand_refs)
    cotangent = read(rows_by_name["cotangent"])
    of_rows = gradient_rows.of_scratch(numbers, cotangent)
    for rows in visit.chunks(problem):
      scores, pull_back = visit.scores(
        problem, query[rows, :], key, parts, rows, masked, wanted
      )
      _, of_scores = visit.weights(
        problem, scores, value, parts, rows, of_rows.of(rows)
      )
      of_query, of_parts = pull_back(of_scores)
      summed[rows, :] += of_query
      sums.add(of_parts, rows)

  visit.either(problem, update)
  sums.finish(visit)

  @pl.when(visit.has(LAST))
  def _():
    write(gradient_ref, problem.of_finite(read(query_ref), summed[...]))


def of_keys(
  problem: Any,
  wanted: Sequence[int],
  are_shared: Sequence[bool],
  visit: Any,
  inputs: Sequence[Any],
  outputs: Sequence[Any],
  scratch: Sequence[Any],
) -> None:
  """Adds the gradients of a tile of queries; `wanted` are operands.

  `are_shared` is whether the groups of visits share keys, and values.
  """
  count = len(gradient_rows.names(problem.is_masked)) + 1
  query_ref, key_ref, value_ref, *rest = inputs
  operand_refs, (*row_refs, cotangent_ref) = rest[:-count], rest[-count:]
  key_sum, value_sum, *sum_refs = scratch
  sums = Sums(problem.operands_of(wanted), outputs[2:], sum_refs)

  for each, is_shared in zip((key_sum, value_sum), are_shared):

    @pl.when(visit.starts(is_shared=is_shared))
    def _(each=each):
      each[...] = jnp.zeros_like(each)

  sums.start(visit)

  def update(masked):
    query, key, value = (
      problem.finite(read(ref)) for ref in (query_ref, key_ref, value_ref)
    )
    parts = visit.parts(problem, operand_refs)
    of_rows = gradient_rows.of_results(row_refs, read(cotangent_ref))
    for rows in visit.chunks(problem):
      scores, pull_back = visit.scores(
        problem,
        query[rows, :],
        key,
        parts,
        rows,
        masked,
        wanted,
        of_keys=True,
      )
      own = of_rows.of(rows)
      weights, of_scores = visit.weights(
        problem, scores, value, parts, rows, own
      )
      of_key, of_parts = pull_back(of_scores)
      key_sum[...] += of_key
      value_sum[...] += problem.product(
        weights, own.cotangent, (0, 0), value.dtype
      )
      sums.add(of_parts, rows)

  visit.either(problem, update)
  sums.finish(visit)

  @pl.when(visit.ends(is_shared=are_shared[0]))
  def _():
    write(outputs[0], problem.of_finite(read(key_ref), key_sum[...]))

  @pl.when(visit.ends(is_shared=are_shared[1]))
  def _():
    write(outputs[1], value_sum[...])


def of_pairs(
  problem: Any,
  wanted: int,
  visit: Any,
  inputs: Sequence[Any],
  outputs: Sequence[Any],
  scratch: Sequence[Any],
) -> None:
  """Adds the gradient of a tile of an array, of one of those that share it."""
  del scratch
  count = len(gradient_rows.names(problem.is_masked)) + 1
  token_refs, rest = inputs[:3], inputs[3:]
  operand_refs, (*row_refs, cotangent_ref) = rest[:-count], rest[-count:]
  (gradient_ref,) = outputs

  @pl.when(visit.has(FIRST))
  def _():
    gradient_ref[...] = jnp.zeros_like(gradient_ref)

  def update(masked):
    query, key, value = (problem.finite(read(ref)) for ref in token_refs)
    parts = visit.parts(problem, operand_refs)
    of_rows = gradient_rows.of_results(row_refs, read(cotangent_ref))
    for rows in visit.chunks(problem):
      scores, pull_back = visit.scores(
        problem, query[rows, :], key, parts, rows, masked, [wanted]
      )
      _, of_scores = visit.weights(
        problem, scores, value, parts, rows, of_rows.of(rows)
      )
      _, (of_part,) = pull_back(of_scores)
      gradient_ref[rows, :] += of_part

  visit.either(problem, update)
