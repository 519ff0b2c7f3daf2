"""Errors against float64."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend, scores
from benchmarks.attention import cases, peers
from benchmarks.attention.measure import Entry, Job, Row, Target

_CONTEXT, _SCORES = "context of scaled_dot", "additive scores"


def jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """The largest absolute errors, for unit-normal and for large inputs."""
  del rounds  # nothing is timed
  length, size = grid.accuracy, grid.hidden
  return [
    Job("accuracy of contexts", functools.partial(_contexts, length)),
    *(
      Job(
        "accuracy of additive scores",
        functools.partial(_additive, min(length, 512), size, largest),
      )
      for largest in (None, 60.0)
    ),
  ]


def _row(case: str, length: int, errors: dict[str, float]) -> Row:
  entries = [
    Entry(name, notes={"error": error}) for name, error in errors.items()
  ]
  return Row(case, "forward", length, entries)


def _error(found, exact) -> float:
  return float(np.abs(np.asarray(found, np.float64) - exact).max())


def _contexts(length: int) -> Row:
  shape = (1, 1, length)
  query, key, value = cases.tokens(shape)
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (query, key, value)]
    exact = np.asarray(attend(*wide, implementation="reference"))
  errors = {
    name: _error(
      attend(query, key, value, implementation=implementation), exact
    )
    for name, implementation in peers.OURS.items()
  }
  for peer in peers.scaled_dot_peers(shape, "forward", causal=False):
    context = np.asarray(peer.run())
    if peer.name == "jax.nn":
      context = np.swapaxes(context, 1, 2)
    errors[peer.name] = _error(context, exact)
  return _row(f"{_CONTEXT}, T={length}", length, errors)


def _additive(length: int, size: int, largest: float | None) -> Row:
  """With projected tokens unit-normal, or uniform up to `largest`."""
  score_weight = cases.draw((size,), 2)
  if largest is None:
    query, key = (cases.draw((length, size), seed) for seed in range(2))
    case = f"{_SCORES}, A={size}"
  else:
    query, key = (
      jax.random.uniform(
        jax.random.key(seed), (length, size), minval=-largest, maxval=largest
      )
      for seed in range(2)
    )
    case = f"{_SCORES}, A={size}, up to {largest:.0f}"
  # Exact projections, so that only the score has an error.
  identity = jnp.eye(size)
  found = jax.jit(scores.additive_score)(
    query, key, identity, identity, score_weight
  )
  rows, columns, weight = (
    np.asarray(x, np.float64) for x in (query, key, score_weight)
  )
  exact = np.stack([np.tanh(row + columns) @ weight for row in rows])
  plain = jax.jit(lambda q, k, w: jnp.tanh(q[:, None] + k[None]) @ w)
  errors = {
    "additive_score": _error(found, exact),
    "plain jax": _error(plain(query, key, score_weight), exact),
  }
  return _row(case, length, errors)


def targets(rows: Sequence[Row]) -> list[Target]:
  """One for each row."""
  found = []
  for row in rows:
    contexts = row.case.startswith(_CONTEXT)
    entry = row.entry("blockwise") if contexts else row.entries[0]
    if entry is not None:
      goal = 2e-6 if contexts else 1e-5
      name = f"{row.case}: largest absolute error"
      found.append(Target("accuracy", name, entry.notes["error"], goal))
  return found
