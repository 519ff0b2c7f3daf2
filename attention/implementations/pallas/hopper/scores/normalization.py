"""The normalizer of a tile in Hopper kernels: numerators and their sum.

Weights are numerators / (sum of parts + epsilon), see `OnlineNormalizer`. Those
of softmax and `Quotient` are powers of 2, all others are traced outside of the
kernels. There is one tile of scores, or two for `Quotient`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from attention.implementations.pallas.evaluation import Rules
from attention.implementations.pallas.functions import check_supported
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.block.gradient_rows import (
  means,
  row_numbers,
)
from attention.implementations.pallas.hopper.tiles import kept_tiles
from attention.implementations.pallas.hopper.tiles.layout import (
  TILE,
  WGMMA,
  across,
)
from attention.implementations.pallas.hopper.traced.functions import (
  inlined,
  without_stops,
)
from attention.implementations.pallas.hopper.traced.pairs import evaluate
from attention.implementations.pallas.operands import Unsupported
from attention.normalizers import OnlineNormalizer, Quotient, is_softmax
from attention.request import Request

LOG2_E = math.log2(math.e)
LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
  """A normalizer as functions of the scores [64, 64] of a tile."""

  epsilon: float
  smallest_maximum: float
  exponents: Jaxpr  # of (scores)
  terms: Jaxpr  # of (scores, maximum): numerators and parts
  # of (scores, maximum, cotangents of numerators, of parts): those of scores
  pull_back: Jaxpr

  def bounded(self, maximum: jax.Array) -> jax.Array:
    """The maximum that terms are relative to."""
    smallest = self.smallest_maximum
    return maximum if smallest == -np.inf else jnp.maximum(maximum, smallest)


def terms_of(request: Request) -> Terms | None:
  """The functions of a normalizer; None for softmax and `Quotient`.

  Raises `Unsupported` for operations that kernels do not have.
  """
  normalizer = request.online_normalizer
  if is_softmax(normalizer) or isinstance(normalizer, Quotient):
    return None
  assert isinstance(normalizer, OnlineNormalizer)

  def pull_back(scores, maximum, of_numerators, of_parts):
    transpose = jax.vjp(lambda x: normalizer.terms(x, maximum), scores)[1]
    return transpose((of_numerators, of_parts))

  def traced(function, number):
    tile = jax.ShapeDtypeStruct(TILE, jnp.float32)
    closed = without_stops(inlined(function, *[tile] * number))
    check_supported(closed.jaxpr, Rules({}, is_interpreted=False))
    if closed.consts:
      raise Unsupported("has normalizers without arrays")
    return closed.jaxpr

  return Terms(
    normalizer.epsilon,
    normalizer.smallest_maximum,
    traced(normalizer.exponents, 1),
    traced(normalizer.terms, 2),
    traced(pull_back, 4),
  )


def added(
  problem: Any, scores: Sequence[jax.Array], maximum: jax.Array
) -> tuple[jax.Array, ...]:
  """Numerators, parts, the factor of sums before, and the new maximum.

  The maximum of softmax is one of powers of 2.
  """
  terms = problem.normalizer
  if terms is None:
    highest = jnp.max(functools.reduce(jnp.maximum, scores), axis=1)
    after = jnp.maximum(maximum, highest * LOG2_E)
    shrink = jnp.exp2(maximum - after)
    exponentials = [
      jnp.exp2(each * LOG2_E - across(after, TILE)) for each in scores
    ]
    return exponentials[0], exponentials[-1], shrink, after
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
  if block.scores is not None:
    kept_tiles.write(block.problem, block.scores, scores[-1])
  if terms is None:
    return _fractions(block, scores[0])
  numerators, _ = _evaluated(
    block.problem, terms.terms, [*scores, row_numbers(block, "maximum")]
  )
  return numerators * row_numbers(block, "inverse")


def _fractions(block: Block, scores: jax.Array) -> jax.Array:
  """The exponentials of scores, divided by the sums of rows."""
  exponents = jnp.minimum(scores - row_numbers(block, "maximum"), 0.0)
  return jnp.exp2(exponents * LOG2_E) * row_numbers(block, "inverse")


def of_scores(
  block: Block, own: jax.Array, of_weights: jax.Array
) -> list[jax.Array]:
  """The cotangents of scores, for own weights and their cotangents."""
  problem = block.problem
  if problem.normalizer is None and block.scores is None:
    return [own * (of_weights - means(block))]
  # Registers are scarce.
  scores = kept_tiles.read(problem, block.scores)
  if problem.normalizer is None:
    return [own * of_weights, -means(block) * _fractions(block, scores)]
  # Also the mean of a row of NaN whose parts have no derivatives.
  mean = 0.0 * means(block) if problem.is_masked else 0.0
  of_numerators = (of_weights + mean) * row_numbers(block, "inverse")
  arguments = [
    scores,
    row_numbers(block, "maximum"),
    of_numerators,
    -means(block) * row_numbers(block, "inverse"),
  ]
  (result,) = _evaluated(problem, problem.normalizer.pull_back, arguments)
  # Derivatives of terms may not be finite at -inf.
  return [jnp.where(scores == -jnp.inf, 0.0, result)]


def _evaluated(problem: Any, jaxpr: Jaxpr, arguments: Any) -> list[jax.Array]:
  """The results of a function of pairs, [64, 64]."""
  return [
    problem.cast(jnp.broadcast_to(each, TILE), WGMMA)
    for each in evaluate(jaxpr, arguments)
  ]
