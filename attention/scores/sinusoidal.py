"""Transformer-XL's score, with sinusoids of the distance."""

import dataclasses
from typing import Annotated as Shaped

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.head_parameters import MATRIX, SCALAR, VECTOR
from attention.arrays.matmul import inner_products
from attention.checks import check_floating, check_shape
from attention.positional.position_arrays import positions as count
from attention.scores.base import Score
from attention.scores.relative import check_table, joined, scaled_scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TransformerXL(Score):
  """Transformer-XL's score, scale * ((q + u) . k + (q + v) . W r[i - j]).

  r are sinusoids of the distance. See "Transformer-XL: Attentive Language
  Models Beyond a Fixed-Length Context", Dai et al., 2019, section 3.3
  (https://arxiv.org/abs/1901.02860). With the sums of angles, the last term is
  a dot product of two vectors that depend on one position each, so the paper's
  relative shift is not needed.

  Attributes:
    weight: [..., R, D], the paper's W_k,R transposed; R is even.
    content_bias: [..., D], the paper's u.
    position_bias: [..., D], the paper's v.
    scale: a number, or an array [...] over leading axes; None means D ** -0.5.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> score = scores.transformer_xl(jnp.eye(2), jnp.zeros(2), jnp.zeros(2))
    >>> score(jnp.array([[0.0, 1.0]]), jnp.zeros((2, 2)))  # cosines
    Array([[0.707, 0.382 ]], dtype=float32)
  """

  weight: Shaped[jax.Array, "... R D"] = dataclasses.field(metadata=MATRIX)
  content_bias: Shaped[jax.Array, "... D"] = dataclasses.field(metadata=VECTOR)
  position_bias: Shaped[jax.Array, "... D"] = dataclasses.field(metadata=VECTOR)
  scale: float | Shaped[jax.Array, "..."] | None = dataclasses.field(
    default=None, metadata=SCALAR
  )

  def check(self, query, key):
    features = query.shape[-1]
    check_shape("key", key, length=None, features=features, fits="query")
    check_table("weight", self.weight, query, "query")
    if self.weight.shape[-2] % 2:
      raise AssertionError(
        f"weight has shape {self.weight.shape}, but must be [..., R, "
        f"{features}] with an even R"
      )
    for name in ("content_bias", "position_bias"):
      array = getattr(self, name)
      check_floating(**{name: array})
      check_shape(name, array, features=features, fits="query")

  def map_query(self, query):
    """[q + u, W (q + v)]."""
    vectors = []
    for bias in (self.content_bias, self.position_bias):
      tokens, bias = axes.aligned(query, jnp.asarray(bias)[..., None, :])
      vectors.append(tokens + bias)
    content, position = vectors
    position = jnp.einsum("...td,...rd->...tr", position, self.weight)
    return joined(content, position)

  def pair_at(self, query, key, positions):
    scores = inner_products(*self.factors(query, key, positions))
    return scaled_scores(scores, self.scale, key.shape[-1])

  def factors(self, query, key, positions):
    """Tokens whose dot products are the scores before they are scaled."""
    content, vectors = jnp.split(query, [key.shape[-1]], axis=-1)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    first, second = jnp.split(vectors.astype(dtype), 2, axis=-1)
    # Distances from the tile's first key keep angles near the diagonal exact.
    start = positions.query_start - positions.key_start
    sines, cosines = (
      axes.with_rank(each, query.ndim)
      for each in self.sinusoids(start + count(query.shape[-2]), dtype)
    )
    rotated = jnp.concatenate(
      [second * sines - first * cosines, first * sines + second * cosines],
      axis=-1,
    )
    of_keys = self.sinusoids(count(key.shape[-2]), dtype)
    of_keys = jnp.concatenate(of_keys, axis=-1)
    return (
      joined(content, rotated),
      joined(key, axes.with_rank(of_keys, key.ndim)),
    )

  def sinusoids(self, places, dtype):
    """Sines and cosines [n, R / 2] of places times all frequencies."""
    size = self.weight.shape[-2]
    frequencies = [10000.0 ** (-n / size) for n in range(0, size, 2)]
    places = jnp.asarray(places).astype(dtype)[:, None]
    angles = places * jnp.asarray(frequencies, dtype)[None]
    return jnp.sin(angles), jnp.cos(angles)
