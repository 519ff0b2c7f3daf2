"""Scores that depend on the distance between a query and a key.

They multiply tokens with one vector for each distance, see
`attention.scores.distances`.
"""

import dataclasses
import functools
import math
from typing import Annotated as Shaped

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.head_parameters import MATRIX, SCALAR
from attention.arrays.matmul import inner_products
from attention.checks import check_floating, check_shape
from attention.scores import distances
from attention.scores.base import Score


def _first_distance(positions) -> int | jax.Array:
  """The smallest j - i of a tile: of its last query and its first key."""
  last_query = positions.query_start + positions.num_queries - 1
  return positions.key_start - last_query


def joined(left, right) -> jax.Array:
  """The features of two arrays [..., n, D], whose leading axes broadcast."""
  left, right = axes.aligned(left, right)
  leading = jnp.broadcast_shapes(left.shape[:-1], right.shape[:-1])
  return jnp.concatenate(
    [jnp.broadcast_to(x, (*leading, x.shape[-1])) for x in (left, right)],
    axis=-1,
  )


def scaled_scores(scores, scale, features: int, terms: int = 1) -> jax.Array:
  """Scores times a scale [...]; None means (terms * features) ** -0.5."""
  if scale is None:
    return scores * (1.0 / math.sqrt(max(terms * features, 1)))
  return jnp.multiply(*axes.with_scalar(scores, scale))


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

  relative_keys: Shaped[jax.Array, "... 2*m+1 D"] = dataclasses.field(
    metadata=MATRIX
  )
  scale: float | Shaped[jax.Array, "..."] | None = dataclasses.field(
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

  def pair_at(self, query, key, positions):
    table = jnp.asarray(self.relative_keys)
    scores = distances.with_products(
      inner_products(query, key),
      query,
      table,
      _first_distance(positions) + table.shape[-2] // 2,
      look_up=positions.look_up,
    )
    return scaled_scores(scores, self.scale, key.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Disentangled(Score):
  """DeBERTa's score: content to content, to position, and position to content.

      scale * (q_i . k_j + q_i . kr[d(i, j)] + k_j . qr[d(j, i)]),
      d(i, j) = clip(i - j + m, 0, 2m - 1)

  See "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", He et al.,
  2020, equations 3 and 4 (https://arxiv.org/abs/2006.03654). The authors' code
  has qr[d(i, j)] in the last term, and so have the weights that they trained.

  Attributes:
    relative_keys: [..., 2m, D], the paper's K_r = P W_k,r; None omits its term.
    relative_queries: [..., 2m, D], the paper's Q_r; None omits its term.
    scale: a number, or an array [...] over leading axes; None means
      (n D) ** -0.5 for n terms, with all three (3 D) ** -0.5.
    as_released: whether the last term is that of the authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> table = jnp.array([[1.0], [2.0]])  # m = 1
    >>> score = scores.disentangled(table, None, scale=1.0)
    >>> score(jnp.ones((1, 1)), jnp.zeros((2, 1)))
    Array([[2., 1.]], dtype=float32)
  """

  relative_keys: Shaped[jax.Array, "... 2*m D"] | None = dataclasses.field(
    metadata=MATRIX
  )
  relative_queries: Shaped[jax.Array, "... 2*m D"] | None = dataclasses.field(
    metadata=MATRIX
  )
  scale: float | Shaped[jax.Array, "..."] | None = dataclasses.field(
    default=None, metadata=SCALAR
  )
  as_released: bool = dataclasses.field(
    default=False, metadata={"static": True}
  )

  def check(self, query, key):
    check_shape("key", key, length=None, features=query.shape[-1], fits="query")
    for name, tokens in (("relative_keys", query), ("relative_queries", key)):
      table = getattr(self, name)
      if table is not None:
        check_table(name, table, tokens, "query")
        if table.shape[-2] % 2:
          raise AssertionError(
            f"{name} has {table.shape[-2]} distances, but must have 2m"
          )
    if self.relative_keys is not None and self.relative_queries is not None:
      distances = self.relative_keys.shape[-2]
      check_shape(
        "relative_queries",
        self.relative_queries,
        distances=distances,
        features=None,
        fits="relative_keys",
      )

  def pair_at(self, query, key, positions):
    scores = inner_products(query, key)
    with_products = functools.partial(
      distances.with_products, look_up=positions.look_up
    )
    if self.relative_keys is not None:
      # d(i, j) descends with j - i, and d(j, i) with i - j.
      table = jnp.asarray(self.relative_keys)
      first = _first_distance(positions) + table.shape[-2] // 2 - 1
      scores = with_products(scores, query, table, first, is_descending=True)
    if self.relative_queries is not None:
      table = jnp.asarray(self.relative_queries)
      # From the first query to the last key of the tile.
      last = positions.key_start + positions.num_keys - 1
      first = positions.query_start - last + table.shape[-2] // 2
      scores = with_products(
        scores,
        key,
        table,
        first if self.as_released else first - 1,
        by_key=True,
        is_descending=not self.as_released,
      )
    tables = self.relative_keys, self.relative_queries
    number = 1 + sum(table is not None for table in tables)
    return scaled_scores(scores, self.scale, query.shape[-1], number)


def check_table(name, table, tokens, fits):
  """Raises AssertionError unless a table is [..., rows, D] for tokens."""
  check_floating(**{name: table})
  check_shape(name, table, rows=None, features=tokens.shape[-1], fits=fits)
  if not table.shape[-2]:
    raise AssertionError(f"{name} has no rows: its shape is {table.shape}")
