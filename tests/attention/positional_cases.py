"""Scores that read positions: NumPy formulas of one pair, in float64."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention import scores
from tests.attention.oracle import draw

FEATURES, WINDOW = 4, 3.0


@dataclasses.dataclass(frozen=True)
class Case:
  """A score: its parameters' shapes, the library's form, one pair's formula.

  `pair` is (parameters, query, key, i, j, number of keys) -> score.
  """

  shapes: dict[str, tuple[int, ...]]
  bound: Callable[[dict], scores.Score]
  pair: Callable[..., float]


def _closure(p, q, k, i, j, length):
  return q @ k - p["slope"] * abs(i - j)


def _bound_closure(p):
  def score(query, key, query_positions, key_positions):
    distance = jnp.abs(query_positions - key_positions)
    return query @ key.mT - p["slope"] * distance

  return scores.positional(score)


def _modified(p, q, k, i, j, length):
  score = q @ k / math.sqrt(len(q))
  return score * np.cos(p["slope"] * (i - j)) if j <= i + 4 else -np.inf


def _bound_modified(p):
  def modify(scores, query_positions, key_positions):
    distance = query_positions - key_positions
    scores = scores * jnp.cos(p["slope"] * distance)
    return jnp.where(distance >= -4, scores, -jnp.inf)

  return scores.modified(scores.scaled_dot(), modify)


def _location(p, q, k, i, j, length):
  weight = p["weight"]
  return weight[j] @ q if j < len(weight) else -np.inf


def _local_m(p, q, k, i, j, length):
  return q @ k if abs(i - j) <= WINDOW else -np.inf


def _local_p(p, q, k, i, j, length):
  hidden = np.tanh(q @ p["query_weight"])
  center = length / (1.0 + np.exp(-hidden @ p["position_weight"]))
  if abs(j - center) > WINDOW:
    return -np.inf
  return q @ k - (j - center) ** 2 / (2.0 * (WINDOW / 2.0) ** 2)


def _causal_local_p(p, q, k, i, j, length):
  return _local_p(p, q, k, i, j, i + 1)


def _shaw(p, q, k, i, j, length):
  table = p["relative_keys"]
  most = len(table) // 2
  relative = table[np.clip(j - i, -most, most) + most]
  return q @ (k + relative) / math.sqrt(len(q))


def _disentangled(p, q, k, i, j, length, as_released=False):
  keys, queries = p["relative_keys"], p["relative_queries"]
  most = len(keys) // 2

  def index(i, j):
    # Equation 3 of the paper.
    if i - j <= -most:
      return 0
    return 2 * most - 1 if i - j >= most else i - j + most

  last = index(i, j) if as_released else index(j, i)
  total = q @ k + q @ keys[index(i, j)] + k @ queries[last]
  return total / math.sqrt(3 * len(q))


def _transformer_xl(p, q, k, i, j, length):
  size = len(p["weight"])
  angles = (i - j) / 10000.0 ** (np.arange(0, size, 2) / size)
  relative = np.concatenate([np.sin(angles), np.cos(angles)]) @ p["weight"]
  content = (q + p["content_bias"]) @ k
  return (content + (q + p["position_bias"]) @ relative) / math.sqrt(len(q))


def _forgetting(p, q, k, i, j, length):
  gates = p["log_gates"]
  decay = gates[j + 1 : i + 1].sum() - gates[i + 1 : j + 1].sum()
  return q @ k + decay


def _soft_cap(p, q, k, i, j, length):
  return 2.0 * np.tanh(q @ k / 2.0)


def _qk_norm(p, q, k, i, j, length):
  def normalised(x):
    return x / np.sqrt(np.mean(x**2) + 1e-6)

  return (normalised(q) * p["query_gain"]) @ (normalised(k) * p["key_gain"])


d = FEATURES
CASES = {
  "positional": Case({"slope": ()}, _bound_closure, _closure),
  "modified": Case({"slope": ()}, _bound_modified, _modified),
  "location": Case(
    {"weight": (9, d)}, lambda p: scores.location(**p), _location
  ),
  "local_m": Case({}, lambda p: scores.local(scores.dot(), WINDOW), _local_m),
  "local_p": Case(
    {"query_weight": (d, 6), "position_weight": (6,)},
    lambda p: scores.local(scores.dot(), WINDOW, **p),
    _local_p,
  ),
  "causal_local_p": Case(
    {"query_weight": (d, 6), "position_weight": (6,)},
    lambda p: scores.local(scores.dot(), WINDOW, **p, causal=True),
    _causal_local_p,
  ),
  "shaw": Case({"relative_keys": (7, d)}, lambda p: scores.shaw(**p), _shaw),
  "disentangled": Case(
    {"relative_keys": (8, d), "relative_queries": (8, d)},
    lambda p: scores.disentangled(**p),
    _disentangled,
  ),
  "disentangled_as_released": Case(
    {"relative_keys": (8, d), "relative_queries": (8, d)},
    lambda p: scores.disentangled(**p, as_released=True),
    functools.partial(_disentangled, as_released=True),
  ),
  "transformer_xl": Case(
    {"weight": (6, d), "content_bias": (d,), "position_bias": (d,)},
    lambda p: scores.transformer_xl(**p),
    _transformer_xl,
  ),
  "forgetting": Case(
    {"log_gates": (13,)},
    lambda p: scores.forgetting(scores.dot(), **p),
    _forgetting,
  ),
  "soft_cap": Case({}, lambda p: scores.soft_cap(scores.dot(), 2.0), _soft_cap),
  "temperature": Case(
    {"temperature": ()},
    lambda p: scores.temperature(scores.dot(), **p),
    lambda p, q, k, i, j, length: q @ k / p["temperature"],
  ),
  "qk_norm": Case(
    {"query_gain": (d,), "key_gain": (d,)},
    lambda p: scores.qk_norm(scores.dot(), **p),
    _qk_norm,
  ),
}


def draw_case(name, seed=3):
  """Parameters of a case; no temperature is near 0."""
  shapes = CASES[name].shapes
  drawn = dict(zip(shapes, draw(seed, *shapes.values())))
  if name == "temperature":
    drawn["temperature"] = np.abs(drawn["temperature"]) + 0.5
  return drawn


def loop(name, parameters, query, key, first=0):
  """[..., T, S] scores, one pair at a time; queries start at `first`."""
  out = np.zeros((*query.shape[:-1], key.shape[-2]))
  for index in np.ndindex(out.shape):
    *lead, i, j = index
    out[index] = CASES[name].pair(
      parameters,
      query[(*lead, i)],
      key[(*lead, j)],
      i + first,
      j,
      key.shape[-2],
    )
  return out


def as_arrays(tree, dtype=None):
  """The leaves of a pytree as JAX arrays."""
  return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)
