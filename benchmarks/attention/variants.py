"""The sections of other normalizers and of scores that read positions."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from attention import normalizers, scores
from benchmarks.attention import cases, peers
from benchmarks.attention.measure import (
  DIRECTIONS,
  Contender,
  Job,
  Row,
  Target,
  by_direction,
  compiled,
)
from benchmarks.attention.score_cases import ScoreCase

# By name in the table, with the goal of the time divided by softmax's.
_NORMALIZERS = {
  "softmax": (None, None),
  "sink": (normalizers.softmax(sink=0.0), 1.3),
  "sigmoid": (normalizers.sigmoid(-math.log(2048)), 1.3),
  "softpick": (normalizers.softpick(), 1.3),
  "signed": (normalizers.signed_softmax(), 1.3),
  "entmax 1.5": (normalizers.entmax(1.5), 3.0),
  "sparsemax": (normalizers.sparsemax(), 3.0),
  "stick breaking": (normalizers.stick_breaking(), None),
}


def normalizer_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """Each normalizer, with scaled dot products and without a mask."""
  shape = grid.normalizers

  def make(direction):
    return [
      peers.ours(
        "blockwise", shape, direction, normalizer=normalizer, name=name
      )
      for name, (normalizer, _) in _NORMALIZERS.items()
    ]

  return by_direction(cases.title(shape), shape, rounds, make)


def normalizer_targets(rows: Sequence[Row]) -> list[Target]:
  """The time of each normalizer divided by that of softmax."""
  return [
    Target(
      "normalizers",
      f"{row.case} {row.direction}: {name} / softmax",
      ratio,
      goal,
    )
    for row in rows
    for name, (_, goal) in _NORMALIZERS.items()
    if name != "softmax" and (ratio := row.ratio(name, "softmax")) is not None
  ]


def positional_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """Scores that read positions, compared with dense formulas."""
  shape, most = grid.positional, grid.distances
  made = {
    "shaw": ScoreCase(scores.shaw, ((33, cases.SIZE),)),
    "disentangled": ScoreCase(
      scores.disentangled, ((2 * most, cases.SIZE),) * 2
    ),
  }
  return [
    each
    for name, case in made.items()
    for each in by_direction(
      f"{name} {cases.title(shape)}",
      shape,
      rounds,
      functools.partial(_positional, name, case, shape),
    )
  ]


def _positional(name, case, shape, direction) -> list[Contender]:
  arguments = [*cases.tokens(shape), *cases.parameters(case)]
  return [
    peers.ours("blockwise", shape, direction, score=case),
    peers.ours("reference", shape, direction, score=case),
    compiled("plain jax", _PLAIN[name], arguments, direction),
  ]


def _plain_shaw(query, key, value, table):
  """Shaw's formula with a look-up for each pair."""
  length, most = query.shape[-2], table.shape[0] // 2
  numbers = jnp.arange(length)
  distances = jnp.clip(numbers - numbers[:, None], -most, most) + most
  return _attended(_looked_up(query @ table.T, distances), query, key, value, 1)


def _plain_disentangled(query, key, value, keys, queries):
  """DeBERTa's formula with two look-ups for each pair, as its authors do."""
  length, most = query.shape[-2], keys.shape[0] // 2
  numbers = jnp.arange(length)
  distances = numbers[:, None] - numbers + most
  distances = jnp.clip(distances, 0, 2 * most - 1)
  by_query = _looked_up(query @ keys.T, distances)
  by_key = jnp.swapaxes(_looked_up(key @ queries.T, distances), -1, -2)
  return _attended(by_query + by_key, query, key, value, 3)


_PLAIN: dict[str, Callable] = {
  "shaw": _plain_shaw,
  "disentangled": _plain_disentangled,
}


def _looked_up(products, distances):
  shape = (*products.shape[:-1], distances.shape[-1])
  return jnp.take_along_axis(
    products, jnp.broadcast_to(distances, shape), axis=-1
  )


def _attended(relative, query, key, value, terms):
  products = query @ jnp.swapaxes(key, -1, -2) + relative
  weights = jax.nn.softmax(products / math.sqrt(terms * query.shape[-1]))
  return weights @ value


def positional_targets(rows: Sequence[Row]) -> list[Target]:
  """The speed-up over the dense formulas."""
  goals = {DIRECTIONS[1]: 1.75}
  return [
    Target(
      "positional",
      f"{row.case} {row.direction}: {other} / blockwise",
      ratio,
      goals.get(row.direction),
      at_least=True,
    )
    for row in rows
    for other in ("reference", "plain jax")
    if (ratio := row.ratio(other, "blockwise")) is not None
  ]
