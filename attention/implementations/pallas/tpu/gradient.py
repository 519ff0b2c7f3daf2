"""One visit of the gradient kernels for TPUs.

All compute scores and weights again, from the statistics of the rows. The
kernel of queries computes the gradients of queries and of arrays of the score,
the kernel of keys those of keys and values, and that of pairs the gradient of
an array with a number for each pair.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.tpu import gradient_rows
from attention.implementations.pallas.tpu.sums import Sums
from attention.implementations.pallas.tpu.tokens import read, write
from attention.implementations.pallas.visits import FIRST, LAST


def of_queries(wanted, names, visit, inputs, outputs, scratch):
  """Adds the gradients of a tile of keys.

  `wanted` are operands, and `names` are those of the last inputs: the results
  of the forward kernel and their cotangents.
  """
  problem = visit.problem
  query_ref, rows_by_name = inputs[0], dict(zip(names, inputs[-len(names) :]))
  summed, numbers, *sum_refs = scratch
  gradient_ref, *results = outputs
  of_operands, results = results[: len(wanted)], results[len(wanted) :]
  sums = Sums(problem.operands_of(wanted), of_operands, sum_refs)

  @pl.when(visit.has(FIRST))
  def _():
    summed[...] = jnp.zeros_like(summed)
    gradient_rows.write_gradient_rows(problem, rows_by_name, results, numbers)

  sums.start(visit)

  def update(masked):
    cotangent = read(rows_by_name["cotangent"])
    of_rows = gradient_rows.of_scratch(numbers, cotangent)
    for chunk in _chunks(visit, inputs, of_rows, masked, wanted):
      summed[chunk.rows, :] += chunk.of_token
      sums.add(chunk.of_parts, chunk.rows)

  visit.either(update)
  sums.finish(visit)

  @pl.when(visit.has(LAST))
  def _():
    write(gradient_ref, problem.of_finite(read(query_ref), summed[...]))


def of_keys(wanted, are_shared, visit, inputs, outputs, scratch):
  """Adds the gradients of a tile of queries; `wanted` are operands.

  `are_shared` is whether the groups of visits share keys, and values.
  """
  problem = visit.problem
  key_sum, value_sum, *sum_refs = scratch
  sums = Sums(problem.operands_of(wanted), outputs[2:], sum_refs)

  for each, is_shared in zip((key_sum, value_sum), are_shared):

    @pl.when(visit.starts(is_shared=is_shared))
    def _(each=each):
      each[...] = jnp.zeros_like(each)

  sums.start(visit)

  def update(masked):
    of_rows = _written_rows(problem, inputs)
    for chunk in _chunks(visit, inputs, of_rows, masked, wanted, of_keys=True):
      key_sum[...] += chunk.of_token
      value_sum[...] += problem.product(
        chunk.weights, chunk.cotangent, (0, 0), inputs[2].dtype
      )
      sums.add(chunk.of_parts, chunk.rows)

  visit.either(update)
  sums.finish(visit)

  @pl.when(visit.ends(is_shared=are_shared[0]))
  def _():
    write(outputs[0], problem.of_finite(read(inputs[1]), key_sum[...]))

  @pl.when(visit.ends(is_shared=are_shared[1]))
  def _():
    write(outputs[1], value_sum[...])


def of_pairs(wanted, visit, inputs, outputs, scratch):
  """Adds the gradient of a tile of an array, of an entry that shares it."""
  sums = Sums(visit.problem.operands_of(wanted), outputs, scratch)
  sums.start(visit)

  def update(masked):
    of_rows = _written_rows(visit.problem, inputs)
    for chunk in _chunks(visit, inputs, of_rows, masked, wanted):
      sums.add(chunk.of_parts, chunk.rows)

  visit.either(update)
  sums.finish(visit)


class _Chunk(NamedTuple):
  """The weights of some queries of a tile, and gradients."""

  rows: slice
  weights: jax.Array  # [r, s]
  cotangent: jax.Array  # [r, E]
  of_token: jax.Array  # the gradient of these queries, or of the tile's keys
  of_parts: Sequence[jax.Array]  # the gradients of the wanted parts


def _chunks(
  visit, inputs, of_rows, masked, wanted, *, of_keys=False
) -> Iterator[_Chunk]:
  """The chunks of a tile; with `of_keys` tokens are keys."""
  problem = visit.problem
  query, key, value = (problem.finite(read(ref)) for ref in inputs[:3])
  end = 3 + len(problem.functions.operands)
  parts = visit.parts(inputs[3:end])
  for rows in visit.chunks():
    own = of_rows.of(rows)
    scores, pull_back = visit.scores(
      query[rows, :], key, parts, rows, masked, wanted, of_keys
    )
    weights, of_scores = visit.weights(scores, value, parts, rows, own)
    yield _Chunk(rows, weights, own.cotangent, *pull_back(of_scores))


def _written_rows(problem, inputs) -> gradient_rows.Rows:
  """The rows that the kernel of queries wrote, the last inputs."""
  count = len(gradient_rows.names(problem.is_masked)) + 1
  *row_refs, cotangent_ref = inputs[-count:]
  return gradient_rows.of_results(row_refs, read(cotangent_ref))
