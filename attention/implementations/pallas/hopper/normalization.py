"""The normalizer of a tile in Hopper kernels: numerators and their sum.

Weights are numerators / (sum of parts + epsilon), see `OnlineNormalizer`. Those
of softmax are powers of 2, all others are traced outside of the kernels. There
is one tile of scores, or two for `Quotient`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from attention.implementations.pallas.functions import Rules, check_supported
from attention.implementations.pallas.hopper import kept_tiles
from attention.implementations.pallas.hopper.block import Block
from attention.implementations.pallas.hopper.gradient_rows import (
  means,
  row_numbers,
)
from attention.implementations.pallas.hopper.pairs import evaluate
from attention.implementations.pallas.hopper.tiles import TILE, WGMMA, across
from attention.implementations.pallas.hopper.tracing import (
  inlined,
  without_stops,
)
from attention.implementations.pallas.operands import Unsupported
from attention.normalizers import OnlineNormalizer, is_softmax
from attention.request import Request

LOG2_E = math.log2(math.e)
LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
  """A normalizer as functions of the scores [64, 64], one tile or two."""

  epsilon: float
  smallest_maximum: float
  exponents: Jaxpr  # of (*scores)
  terms: Jaxpr  # of (*scores, maximum): numerators and parts
  # of (*scores, maximum, cotangents of numerators, of parts): those of scores
  pull_back: Jaxpr

  @property
  def num_scores(self) -> int:
    """The tiles of scores."""
    return len(self.exponents.invars)

  def bounded(self, maximum: jax.Array) -> jax.Array:
    """The maximum that terms are relative to."""
    smallest = self.smallest_maximum
    return maximum if smallest == -np.inf else jnp.maximum(maximum, smallest)


def terms_of(request: Request) -> Terms | None:
  """The functions of a normalizer; None for softmax.

  Raises `Unsupported` for operations that kernels do not have.
  """
  normalizer = request.online_normalizer
  if is_softmax(normalizer):
    return None
  assert isinstance(normalizer, OnlineNormalizer)
  number = 1 if request.score.denominator is None else 2

  def scores_of(arguments):
    scores = arguments[:number]
    return scores if number > 1 else scores[0]

  def exponents(*arguments):
    return normalizer.exponents(scores_of(arguments))

  def terms(*arguments):
    return normalizer.terms(scores_of(arguments), arguments[number])

  def pull_back(*arguments):
    maximum, *cotangents = arguments[number:]

    def terms(scores):
      return normalizer.terms(scores, maximum)

    return jax.vjp(terms, scores_of(arguments))[1](tuple(cotangents))

  def traced(function, others):
    tile = jax.ShapeDtypeStruct(TILE, jnp.float32)
    closed = without_stops(inlined(function, *[tile] * (number + others)))
    check_supported(closed.jaxpr, Rules({}, is_interpreted=False))
    if closed.consts:
      raise Unsupported("has normalizers without arrays")
    return closed.jaxpr

  return Terms(
    normalizer.epsilon,
    normalizer.smallest_maximum,
    traced(exponents, 0),
    traced(terms, 1),
    traced(pull_back, 3),
  )


def added(
  problem: Any, scores: Sequence[jax.Array], maximum: jax.Array
) -> tuple[jax.Array, ...]:
  """Numerators, parts, the factor of sums before, and the new maximum.

  The maximum of softmax is one of powers of 2.
  """
  terms = problem.normalizer
  if terms is None:
    after = jnp.maximum(maximum, jnp.max(scores[0], axis=1) * LOG2_E)
    shrink = jnp.exp2(maximum - after)
    exponentials = jnp.exp2(scores[0] * LOG2_E - across(after, TILE))
    return exponentials, exponentials, shrink, after
  (exponents,) = _evaluated(problem, terms.exponents, scores)
  after = jnp.maximum(maximum, jnp.max(exponents, axis=1))
  before, bound = terms.bounded(maximum), terms.bounded(after)
  shrink = jnp.exp2((before - bound) * LOG2_E)
  numerators, parts = _evaluated(
    problem, terms.terms, [*scores, across(bound, TILE)]
  )
  if problem.is_masked:  # comparisons of a normalizer may lose NaN
    numerators = jnp.where(jnp.isnan(scores[0]), jnp.nan, numerators)
  return numerators, parts, shrink, after


def rows(
  problem: Any, maximum: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The maximum and the total of rows, as other implementations have them."""
  terms = problem.normalizer
  if terms is None:
    return jnp.where(total == 0.0, LOWEST, maximum / LOG2_E), total
  return terms.bounded(maximum), total + terms.epsilon


def weights(block: Block, scores: Sequence[jax.Array]) -> jax.Array:
  """The weights of a tile."""
  # Scores that are computed twice may be rounded differently. Each array of
  # rows is read where it is used, as registers are scarce.
  terms = block.problem.normalizer
  if terms is None:
    exponents = jnp.minimum(scores[0] - row_numbers(block, "maximum"), 0.0)
    return jnp.exp2(exponents * LOG2_E) * row_numbers(block, "inverse")
  for tile, each in zip(block.scores, scores):
    kept_tiles.write(block.problem, tile, each)
  numerators, _ = _evaluated(
    block.problem, terms.terms, [*scores, row_numbers(block, "maximum")]
  )
  return numerators * row_numbers(block, "inverse")


def of_scores(
  block: Block, own: jax.Array, of_weights: jax.Array
) -> list[jax.Array]:
  """The cotangents of scores, for own weights and their cotangents."""
  problem = block.problem
  if problem.normalizer is None:
    return [own * (of_weights - means(block))]
  # Also the mean of a row of NaN whose parts have no derivatives.
  mean = 0.0 * means(block) if problem.is_masked else 0.0
  of_numerators = (of_weights + mean) * row_numbers(block, "inverse")
  # Registers are scarce.
  scores = [kept_tiles.read(problem, tile) for tile in block.scores]
  arguments = [
    *scores,
    row_numbers(block, "maximum"),
    of_numerators,
    -means(block) * row_numbers(block, "inverse"),
  ]
  results = _evaluated(problem, problem.normalizer.pull_back, arguments)
  # Derivatives of terms may not be finite at -inf.
  return [
    jnp.where(own == -jnp.inf, 0.0, each) for own, each in zip(scores, results)
  ]


def _evaluated(problem: Any, jaxpr: Jaxpr, arguments: Any) -> list[jax.Array]:
  """The results of a function of pairs, [64, 64]."""
  return [
    problem.cast(jnp.broadcast_to(each, TILE), WGMMA)
    for each in evaluate(jaxpr, arguments)
  ]
