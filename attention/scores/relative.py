"""Scores that depend on the distance between a query and a key.

A tile's queries and keys are consecutive, so it has t + s - 1 distances and not
t s. A product with one vector for each distance, [t, t + s - 1], is skewed to
the scores [t, s]; no array has D numbers for each pair.
"""

# Overrides keep the docstrings of what they override.
# ruff: noqa: D102

import dataclasses
import math

import jax
import jax.numpy as jnp

from attention import axes
from attention.checks import check_floating, check_shape
from attention.head_parameters import MATRIX, SCALAR
from attention.matmul import inner_products
from attention.scores.base import Score

# More queries or keys than this, in a block of whole rows, are multiplied part
# by part.
_LONGEST, _PART = 512, 128


def _first_distance(positions) -> int | jax.Array:
  """The smallest j - i of a tile: of its last query and its first key."""
  last_query = positions.query_start + positions.num_queries - 1
  return positions.key_start - last_query


def _skewed(products: jax.Array, num_keys: int) -> jax.Array:
  """[..., t, t + s - 1] by distance, ascending, to [..., t, s] by key."""
  *leading, queries, distances = products.shape
  if queries == 1:
    return products
  products = jax.lax.optimization_barrier(products)
  widths = [(0, 0)] * (products.ndim - 1) + [(0, 1)]
  flat = jnp.pad(products, widths).reshape(*leading, -1)
  flat = jax.lax.slice_in_dim(
    flat, queries - 1, queries - 1 + queries * distances, axis=-1
  )
  rows = flat.reshape(*leading, queries, distances)
  # Without the barriers XLA computes the skew again for each of its uses.
  return jax.lax.optimization_barrier(rows[..., :num_keys])


def _relative(tokens, table, first, length: int) -> jax.Array:
  """tokens[i] . table[first + n] for the n-th distance, [..., t, length].

  In a block of whole rows, either number is large and the other small.
  """
  *leading, number, features = tokens.shape
  size = math.gcd(max(number, length), _PART)
  if max(number, length) <= _LONGEST or size < 16:
    rows = _rows(table, first, number + length - 1)
    return _skewed(inner_products(*axes.aligned(tokens, rows)), length)
  if length > number:
    starts = jnp.arange(0, length, size, dtype=jnp.int32)
    products = jax.lax.map(
      jax.checkpoint(
        lambda start: _relative(tokens, table, first + start, size)
      ),
      starts,
    )
    products = jnp.moveaxis(products, 0, -2)
    return jnp.reshape(products, (*products.shape[:-2], length))
  # All at once, the products would be as many as the square of the tokens.
  parts = jnp.reshape(tokens, (*leading, number // size, size, features))
  ends = jnp.arange(size, number + 1, size, dtype=jnp.int32)
  products = jax.lax.map(
    jax.checkpoint(
      lambda part: _relative(part[0], table, first + number - part[1], length)
    ),
    (jnp.moveaxis(parts, -3, 0), ends),
  )
  products = jnp.moveaxis(products, 0, -3)
  return jnp.reshape(products, (*products.shape[:-3], number, length))


def _rows(table, first, number: int, axis: int = -2) -> jax.Array:
  """table[first], table[first + 1], ...; outside of the table, its edge.

  A slice of the padded table: a gather's gradient is slow on CPUs.
  """
  size, shape = table.shape[axis], [*table.shape]
  shape[axis] = number
  before, after = (
    jnp.broadcast_to(
      jax.lax.slice_in_dim(table, end, end + 1, axis=axis), shape
    )
    for end in (0, size - 1)
  )
  padded = jnp.concatenate([before, table, after], axis=axis)
  start = jnp.clip(first + number, 0, size + number)
  return jax.lax.dynamic_slice_in_dim(padded, start, number, axis=axis)


def joined(left, right) -> jax.Array:
  """The features of two arrays [..., n, D], whose leading axes broadcast."""
  left, right = axes.aligned(left, right)
  leading = jnp.broadcast_shapes(left.shape[:-1], right.shape[:-1])
  return jnp.concatenate(
    [jnp.broadcast_to(x, (*leading, x.shape[-1])) for x in (left, right)],
    axis=-1,
  )


def scaled(scores, scale, features: int, terms: int = 1) -> jax.Array:
  """Scores times a scale [...]; None means (terms * features) ** -0.5."""
  if scale is None:
    return scores * (1.0 / math.sqrt(max(terms * features, 1)))
  scale = jnp.asarray(scale, scores.dtype)[..., None, None]
  scores, scale = axes.aligned(scores, scale)
  return scores * scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Shaw(Score):
  """Relative key vectors, scale * q . (k + a[clip(j - i, -m, m)]).

  See "Self-Attention with Relative Position Representations", Shaw et al.,
  2018, equation 4 (https://arxiv.org/abs/1803.02155). The paper's relative
  value vectors (equation 3) are not part of a score.

  Attributes:
    relative_keys: [..., 2m + 1, D], the paper's w^K, from distance -m to m.
    scale: a number, or an array [...] over leading axes; None means D ** -0.5.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> score = scores.shaw(jnp.array([[-1.0], [0.0], [1.0]]))  # m = 1
    >>> score(jnp.ones((2, 1)), jnp.zeros((4, 1)))
    Array([[ 0.,  1.,  1.,  1.],
           [-1.,  0.,  1.,  1.]], dtype=float32)
  """

  relative_keys: jax.Array = dataclasses.field(metadata=MATRIX)
  scale: float | jax.Array | None = dataclasses.field(
    default=None, metadata=SCALAR
  )

  def check(self, query, key):
    check_table("relative_keys", self.relative_keys, query, "query")
    check_shape("key", key, length=None, features=query.shape[-1], fits="query")
    size = self.relative_keys.shape[-2]
    if size % 2 == 0:
      raise AssertionError(
        f"relative_keys has {size} distances, but must have 2m + 1"
      )

  def map_query(self, query):
    """[q, q . a]: the table is small, so its products need no tiles."""
    tokens = axes.aligned(query, jnp.asarray(self.relative_keys))
    return joined(query, inner_products(*tokens))

  def pair_at(self, query, key, positions):
    features, length = key.shape[-1], key.shape[-2]
    products = query[..., features:]
    query = query[..., :features].astype(key.dtype)
    first = _first_distance(positions) + self.relative_keys.shape[-2] // 2
    number = query.shape[-2] + length - 1
    relative = _skewed(_rows(products, first, number, axis=-1), length)
    scores = _sum(inner_products(query, key), relative)
    return scaled(scores, self.scale, features)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Disentangled(Score):
  """DeBERTa's score: content to content, to position, and position to content.

      scale * (q_i . k_j + q_i . kr[d(i, j)] + k_j . qr[d(j, i)]),
      d(i, j) = clip(i - j + m, 0, 2m - 1)

  See "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", He et al.,
  2020, equations 3 and 4 (https://arxiv.org/abs/2006.03654).

  Attributes:
    relative_keys: [..., 2m, D], the paper's K_r = P W_k,r; None omits its term.
    relative_queries: [..., 2m, D], the paper's Q_r; None omits its term.
    scale: a number, or an array [...] over leading axes; None means
      (n D) ** -0.5 for n terms, with all three (3 D) ** -0.5.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> table = jnp.array([[1.0], [2.0]])  # m = 1
    >>> score = scores.disentangled(table, None, scale=1.0)
    >>> score(jnp.ones((1, 1)), jnp.zeros((2, 1)))
    Array([[2., 1.]], dtype=float32)
  """

  relative_keys: jax.Array | None = dataclasses.field(metadata=MATRIX)
  relative_queries: jax.Array | None = dataclasses.field(metadata=MATRIX)
  scale: float | jax.Array | None = dataclasses.field(
    default=None, metadata=SCALAR
  )

  def check(self, query, key):
    check_shape("key", key, length=None, features=query.shape[-1], fits="query")
    for name, tokens in (("relative_keys", query), ("relative_queries", key)):
      table = getattr(self, name)
      if table is not None:
        check_table(name, table, tokens, "query")

  def pair_at(self, query, key, positions):
    scores = inner_products(query, key)
    if self.relative_keys is not None:
      first = _first_distance(positions)
      term = self._term(query, self.relative_keys, first, key.shape[-2])
      scores = _sum(scores, term)
    if self.relative_queries is not None:
      swapped = dataclasses.replace(
        positions,
        query_start=positions.key_start,
        key_start=positions.query_start,
        num_queries=positions.num_keys,
        num_keys=positions.num_queries,
      )
      first = _first_distance(swapped)
      term = self._term(key, self.relative_queries, first, query.shape[-2])
      scores = _sum(scores, jnp.swapaxes(term, -1, -2))
    tables = self.relative_keys, self.relative_queries
    terms = 1 + sum(table is not None for table in tables)
    return scaled(scores, self.scale, query.shape[-1], terms)

  def _term(self, tokens, table, first, length):
    # d(i, j) descends with j - i, so the table is reversed.
    most = table.shape[-2] // 2
    return _relative(tokens, jnp.flip(table, -2), first + most - 1, length)


def _sum(left, right):
  left, right = axes.aligned(left, right)
  return left + right


def check_table(name, table, tokens, fits):
  """Raises AssertionError unless a table is [..., rows, D] for tokens."""
  check_floating(**{name: table})
  check_shape(name, table, rows=None, features=tokens.shape[-1], fits=fits)
