"""Attention as NumPy loops in float64, and the cases of every suite.

The loops compute the papers' formulas for one pair of tokens at a time, without
functions of the library.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention import scores
from attention.implementations.blockwise import Blockwise

# For small problems "blockwise" chooses a single tile; the last implementation
# has several. implementations/blockwise/test_shapes.py draws other sizes.
IMPLEMENTATIONS = [
  "reference",
  "blockwise",
  Blockwise(query_block=2, key_block=3, leading_block=2),
]
HIDDEN = 4


@dataclasses.dataclass(frozen=True)
class Case:
  """A score: its parameters' shapes, the library's form, one pair's formula."""

  shapes: Callable[[int], dict]
  bound: Callable[[dict], Callable]
  pair: Callable[[dict, np.ndarray, np.ndarray], float]


def _cosine(parameters, query, key):
  norm = math.sqrt(query @ query) * math.sqrt(key @ key)
  return float(parameters["sharpness"]) * (query @ key) / norm


def _additive(parameters, query, key):
  hidden = query @ parameters["query_weight"] + key @ parameters["key_weight"]
  return parameters["score_weight"] @ np.tanh(hidden + parameters["bias"])


def _concat(parameters, query, key):
  joined = np.concatenate([query, key])
  return parameters["score_weight"] @ np.tanh(joined @ parameters["weight"])


def _distance(parameters, query, key):
  gap = query @ parameters["weight"] - key
  return -(gap @ gap)


def _distance_closure(parameters):
  weight = parameters["weight"]

  def score(query, key):
    gap = (query @ weight)[..., :, None, :] - key[..., None, :, :]
    return -jnp.sum(gap**2, axis=-1)

  return score


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Bilinear(scores.Score):
  """A score of one's own, with a per-token map and no named layout."""

  weight: jax.Array

  def map_key(self, key):
    return key @ self.weight

  def pair(self, query, key):
    return jnp.einsum("...td,...sd->...ts", jnp.sin(query), key)


CASES = {
  "dot": Case(lambda d: {}, lambda p: scores.dot(), lambda p, q, k: q @ k),
  "scaled_dot": Case(
    lambda d: {},
    lambda p: scores.scaled_dot(),
    lambda p, q, k: q @ k / math.sqrt(len(q)),
  ),
  "general": Case(
    lambda d: {"weight": (d, d)},
    lambda p: scores.general(**p),
    lambda p, q, k: q @ p["weight"] @ k,
  ),
  "additive": Case(
    lambda d: {
      "query_weight": (d, HIDDEN),
      "key_weight": (d, HIDDEN),
      "score_weight": (HIDDEN,),
      "bias": (HIDDEN,),
    },
    lambda p: scores.additive(**p),
    _additive,
  ),
  "concat": Case(
    lambda d: {"weight": (2 * d, HIDDEN), "score_weight": (HIDDEN,)},
    lambda p: scores.concat(**p),
    _concat,
  ),
  "cosine": Case(
    lambda d: {"sharpness": ()}, lambda p: scores.cosine(**p), _cosine
  ),
  "closure": Case(lambda d: {"weight": (d, d)}, _distance_closure, _distance),
  "own": Case(
    lambda d: {"weight": (d, d)},
    lambda p: Bilinear(**p),
    lambda p, q, k: np.sin(q) @ (k @ p["weight"]),
  ),
}


def draw(seed, *shapes, dtype=None):
  """Normal arrays, one a shape: of JAX if they have a `dtype`, or float64."""
  generator = np.random.default_rng(seed)
  drawn = [generator.normal(size=shape) for shape in shapes]
  return drawn if dtype is None else [jnp.asarray(x, dtype) for x in drawn]


def single(seed, *shapes):
  """Those of JAX in float32."""
  return draw(seed, *shapes, dtype=jnp.float32)


def draw_parameters(case, features, seed=7, dtype=None):
  shapes = case.shapes(features)
  return dict(zip(shapes, draw(seed, *shapes.values(), dtype=dtype)))


def loop_scores(pair, parameters, query, key):
  """[..., T, S] scores, one pair at a time."""
  leading = np.broadcast_shapes(query.shape[:-2], key.shape[:-2])
  query = np.broadcast_to(query, leading + query.shape[-2:])
  key = np.broadcast_to(key, leading + key.shape[-2:])
  out = np.zeros((*leading, query.shape[-2], key.shape[-2]))
  for index in np.ndindex(out.shape):
    *lead, i, j = index
    out[index] = pair(parameters, query[(*lead, i)], key[(*lead, j)])
  return out


def loop_attend(table, value, mask=None):
  """Context, lse and weights from a table of scores, row by row."""
  leading = np.broadcast_shapes(table.shape[:-2], value.shape[:-2])
  table = np.broadcast_to(table, leading + table.shape[-2:])
  value = np.broadcast_to(value, leading + value.shape[-2:])
  if mask is None:
    mask = True
  mask = np.broadcast_to(mask, table.shape)
  context = np.zeros((*table.shape[:-1], value.shape[-1]))
  lse = np.full(table.shape[:-1], -np.inf)
  weights = np.zeros(table.shape)
  for row in np.ndindex(table.shape[:-1]):
    seen = [
      j
      for j in range(table.shape[-1])
      if mask[(*row, j)] and table[(*row, j)] > -np.inf
    ]
    if not seen:
      continue
    largest = max(table[(*row, j)] for j in seen)
    total = sum(math.exp(table[(*row, j)] - largest) for j in seen)
    lse[row] = largest + math.log(total)
    for j in seen:
      weights[(*row, j)] = math.exp(table[(*row, j)] - lse[row])
      context[row] += weights[(*row, j)] * value[(*row[:-1], j)]
  return context, lse, weights
