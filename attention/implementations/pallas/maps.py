"""Scores whose maps of tokens are computed inside a kernel."""

import dataclasses

import jax

from attention.scores.base import Wrapper


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MapsInside(Wrapper):
  """The same score of unmapped tokens: tiles are mapped in `pair`."""

  # A tile is mapped at every visit, without arrays of mapped tokens. See
  # hopper/plan.py for what kernels for Hopper GPUs do instead.

  @property
  def is_finite(self):
    return self.score.is_finite

  def map_query(self, query):
    return query

  def map_key(self, key):
    return key

  def pair_at(self, query, key, positions):
    score = self.score
    return score.pair_at(score.map_query(query), score.map_key(key), positions)
