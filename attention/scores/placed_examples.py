"""A score whose examples start at positions of their own."""

import dataclasses
import operator

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.positional.position_arrays import checked_offset
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
    examples, leading = self.row.ndim, query.ndim - 2
    is_tile = len(positions.leading) == leading
    start = positions.leading if is_tile else (0,) * leading
    row, column = self.row, self.column
    sizes = [tokens.shape[:examples] for tokens in (query, key)]
    if is_tile:
      shape = jnp.broadcast_shapes(*sizes)
      row, column = (
        jax.lax.dynamic_slice(each, start[:examples], shape)
        for each in (row, column)
      )
    else:
      shape = jnp.broadcast_shapes(*sizes, row.shape)
    query, key = (
      jnp.broadcast_to(tokens, (*shape, *tokens.shape[examples:]))
      for tokens in (query, key)
    )

    def one(number, row, column, query, key):
      # Axes of size 1, as a score may read the indices along them.
      query, key = (tokens[(None,) * examples] for tokens in (query, key))
      here = tuple(map(operator.add, start, number)) + start[examples:]
      scores = Placed(self.score, row, column, 0, None).pair_at(
        query, key, dataclasses.replace(positions, leading=here)
      )
      if scores.ndim != query.ndim or max(scores.shape[:examples]) > 1:
        raise NotImplementedError(
          f"the score {type(self.score).__name__} has parameters for each "
          "example, so the cache must have one length for all examples"
        )
      return scores.reshape(scores.shape[examples:])

    for _ in range(examples):
      one = jax.vmap(one)
    return one(axes.indices(shape), row, column, query, key)


def place_examples(
  score: Score, row: int | jax.Array, column: int | jax.Array = 0
) -> Score:
  """`score.placed(row, column)`, where both may differ between examples."""
  if not score.reads_positions:
    return score
  if not jnp.ndim(row) and not jnp.ndim(column):
    return score.placed(checked_offset(row), column)
  return PlacedExamples(score, *jnp.broadcast_arrays(row, column))
