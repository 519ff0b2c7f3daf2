"""Times each score in the heads of a Transformer layer.

Batches of every length have the same number of tokens, as in training, so that
only the cost of attention grows with the length.
"""

import functools
from collections.abc import Sequence

import jax

from attention.modules import SCORE_NAMES, MultiHeadAttention
from benchmarks.attention import cases
from benchmarks.attention.measure import (
  DIRECTIONS,
  Contender,
  Job,
  Row,
  Target,
  compiled,
  job,
)

_NUM_HEADS = 4


def jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A row for each length: forward and backward, projections included."""
  tokens = max(grid.heads)
  return [
    job(
      f"{tokens // length}x{length}, {_NUM_HEADS} heads of {cases.SIZE}",
      (length,),
      DIRECTIONS[1],
      rounds,
      functools.partial(_contenders, grid, (tokens // length, length)),
    )
    for length in grid.heads
  ]


def _contenders(grid: cases.Grid, shape: tuple[int, int]) -> list[Contender]:
  names = [name for name in SCORE_NAMES if name != "scaled_dot"]
  return [
    _layer(score, shape)
    for score in ("scaled_dot", *names)
    if not grid.scores or score in grid.scores
  ]


def _layer(score: str, shape: tuple[int, int]) -> Contender:
  module = MultiHeadAttention(num_heads=_NUM_HEADS, score=score)
  tokens = cases.draw((*shape, _NUM_HEADS * cases.SIZE), 0)
  variables = jax.jit(module.init)(jax.random.key(1), tokens)
  leaves, tree = jax.tree.flatten(variables)

  def layer(tokens, *leaves):
    return module.apply(jax.tree.unflatten(tree, leaves), tokens)

  return compiled(score, layer, [tokens, *leaves], DIRECTIONS[1])


def targets(rows: Sequence[Row]) -> list[Target]:
  """The time of each score divided by that of scaled dot, without a goal."""
  return [
    Target("heads", f"T={row.length}: {entry.name} / scaled_dot", ratio)
    for row in rows
    for entry in row.entries[1:]
    if (ratio := row.ratio(entry.name, "scaled_dot")) is not None
  ]
