"""Scores of the benchmarks, with the shapes of their arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention import scores


class ScoreCase(NamedTuple):
  """`bind` makes a score of arrays of these shapes, which get gradients."""

  bind: Callable[..., Any]
  shapes: tuple[tuple[int, ...], ...] = ()


def classical(features: int, hidden: int) -> dict[str, ScoreCase]:
  """The six scores, for D features and the hidden size A."""
  to_hidden = features, hidden
  return {
    "dot": ScoreCase(scores.dot),
    "scaled_dot": ScoreCase(scores.scaled_dot),
    "general": ScoreCase(scores.general, ((features, features),)),
    "additive": ScoreCase(scores.additive, (to_hidden, to_hidden, (hidden,))),
    "concat": ScoreCase(scores.concat, ((2 * features, hidden), (hidden,))),
    "cosine": ScoreCase(scores.cosine, ((),)),
  }


def manhattan(temperature: jax.Array) -> Callable[..., jax.Array]:
  """A user's score, which closes over an array."""

  def score(query, key):
    gap = query[..., :, None, :] - key[..., None, :, :]
    return -jnp.abs(gap).sum(-1) * temperature

  return score


MANHATTAN = ScoreCase(manhattan, ((),))
