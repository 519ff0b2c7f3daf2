"""A score whose examples start at positions of their own."""

import dataclasses

import jax
import jax.numpy as jnp

from attention import axes
from attention.positional import checked_offset
from attention.scores.base import Placed, Score, Wrapper


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PlacedExamples(Wrapper):
  """A score for queries from `row` [B...] and keys from `column` [B...] on."""

  # The axes B... are the leftmost ones of queries, keys and scores.

  row: jax.Array
  column: jax.Array

  def group_heads(self, num_key_value_heads, num_groups):
    score = self.score.group_heads(num_key_value_heads, num_groups)
    return dataclasses.replace(self, score=score)

  def pair_at(self, query, key, positions):
    query, key = axes.aligned(query, key)
    examples = self.row.ndim
    if not examples:
      placed = Placed(self.score, self.row, self.column, 0, None)
      return placed.pair_at(query, key, positions)
    count = max(query.shape[0], key.shape[0])
    row, column = (
      _part(starts, positions, query.ndim - 2, count)
      for starts in (self.row, self.column)
    )
    inner = dataclasses.replace(positions, leading=positions.leading[1:])

    def one(row, column, query, key):
      score = PlacedExamples(self.score, row, column)
      return score.pair_at(query, key, inner)

    query, key = (
      jnp.broadcast_to(tokens, (count, *tokens.shape[1:]))
      for tokens in (query, key)
    )
    scores = jax.vmap(one)(row, column, query, key)
    if scores.ndim != query.ndim:
      raise NotImplementedError(
        f"the score {type(self.score).__name__} has parameters for each "
        "example, so the cache must have one length for all examples"
      )
    return scores


def _part(starts, positions, leading: int, count: int):
  """The starts of a tile's examples, of which there are `count`."""
  if len(positions.leading) == leading:
    return jax.lax.dynamic_slice_in_dim(starts, positions.leading[0], count)
  return starts


def place_examples(
  score: Score, row: int | jax.Array, column: int | jax.Array = 0
) -> Score:
  """`score.placed(row, column)`, where both may differ between examples."""
  if not score.reads_positions:
    return score
  if not jnp.ndim(row) and not jnp.ndim(column):
    return score.placed(checked_offset(row), column)
  return PlacedExamples(score, *jnp.broadcast_arrays(row, column))
