"""The classical scores with their parameters bound, one formula each.

Dot, scaled dot, general and cosine are dot products after a per-token map;
additive and concat are `sum_a v[a] * tanh(q'[a] + k'[a])` after projections.
Every array may have leading axes, so that each head has its own: [H, D, A].
"""

import dataclasses
import math
from typing import Annotated as Shaped

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.head_parameters import MATRIX, SCALAR, VECTOR
from attention.arrays.matmul import inner_products
from attention.checks import check_floating, check_leading, check_shape
from attention.scores.additive_kernel import weighted_tanh_sum
from attention.scores.base import Score


def _wide(*arrays):
  """The dtype to accumulate in: float32 at least."""
  return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def is_half(tokens):
  """Whether the dtype has fewer than 32 bits."""
  return jnp.finfo(tokens.dtype).bits < 32


def _widened(tokens):
  return tokens.astype(_wide(tokens))


def scaled(tokens, factor):
  """Tokens times a factor, a number or [...], rounded once."""
  if isinstance(factor, float):
    factor = float(factor)  # NumPy's would promote the tokens
  dtype = jnp.result_type(tokens, factor)
  factor = jnp.asarray(factor, _wide(tokens, factor))[..., None, None]
  tokens, factor = axes.aligned(tokens.astype(factor.dtype), factor)
  return (tokens * factor).astype(dtype)


def _projected(tokens, weight, bias=None):
  """[..., T, D] and [..., D, A] (and [..., A]) to [..., T, A]."""
  projected = jnp.einsum("...td,...da->...ta", tokens, weight)
  if bias is None:
    return projected
  projected, bias = axes.aligned(projected, jnp.asarray(bias)[..., None, :])
  return projected + bias


def _check_weight(weight, name, tokens, tokens_name):
  check_floating(**{name: weight})
  features = tokens.shape[-1]
  check_shape(name, weight, features=features, size=None, fits=tokens_name)
  check_leading(**{tokens_name: tokens, name: weight})


class ClassicalScore(Score):
  """A score that is finite, with its derivatives, for finite tokens."""

  @property
  def is_finite(self):
    # A class of the user may hide keys.
    return type(self).__module__ == __name__


class DotProduct(ClassicalScore):
  """A score that is a dot product of mapped tokens."""

  def pair(self, query, key):
    features = query.shape[-1]
    check_shape("key", key, length=None, features=features, fits="query")
    return inner_products(query, key)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Dot(DotProduct):
  """See `attention.dot_score`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledDot(DotProduct):
  """See `attention.scaled_dot_score`."""

  scale: float | Shaped[jax.Array, "..."] | None = dataclasses.field(
    default=None, metadata=SCALAR
  )

  def map_query(self, query):
    if is_half(query):
      return query
    return scaled(query, self.factor(query))

  def pair(self, query, key):
    scores = super().pair(query, key)
    if not is_half(query):
      return scores
    # Rounding the scaled query would lose digits that float32 scores have.
    return jnp.multiply(*axes.with_scalar(scores, self.factor(query)))

  def factor(self, tokens):
    """The scale, for tokens [..., D]."""
    if self.scale is None:
      return 1.0 / math.sqrt(max(tokens.shape[-1], 1))
    return self.scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class General(DotProduct):
  """See `attention.general_score`."""

  weight: Shaped[jax.Array, "... Dq Dk"] = dataclasses.field(metadata=MATRIX)

  def check(self, query, key):
    _check_weight(self.weight, "weight", query, "query")
    check_shape("weight", self.weight, size=key.shape[-1], fits="key")

  def map_query(self, query):
    return _projected(query, self.weight)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cosine(DotProduct):
  """See `attention.cosine_score`."""

  sharpness: float | Shaped[jax.Array, "..."] = dataclasses.field(
    default=1.0, metadata=SCALAR
  )

  def map_query(self, query):
    return scaled(_unit(query), self.sharpness)

  def map_key(self, key):
    return _unit(key)


def _unit(tokens):
  """Tokens of length 1; a zero token stays zero and gets zero gradient."""
  return _direction(tokens.astype(_wide(tokens))).astype(tokens.dtype)


@jax.custom_jvp
def _direction(vectors):
  """Vectors divided by their lengths; a zero vector stays zero."""
  # One chain of operations without `where`, which GPUs compute in one kernel.
  # Squares of large and of small components leave the range of the dtype.
  tiny = jnp.finfo(vectors.dtype).tiny
  size = jnp.max(jnp.abs(vectors), axis=-1, keepdims=True, initial=0.0)
  # The reciprocal of a large number would be subnormal, which is zero for XLA.
  root = jax.lax.rsqrt(jnp.maximum(size, tiny))
  vectors = vectors * root * root
  # The largest component is about 1, so the sum is above 0.5.
  square = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
  return vectors * jax.lax.rsqrt(jnp.maximum(square, 0.5))


@_direction.defjvp
def _direction_jvp(primals, tangents):
  """The direction, and its tangent (dv - u (u . dv)) / |v|."""
  # In a `scan`, JAX differentiates this rule and not `_direction` again, so the
  # derivatives of all that is computed here are finite, also for zero vectors.
  (vectors,), (tangent,) = primals, tangents
  size = jax.lax.stop_gradient(
    jnp.max(jnp.abs(vectors), axis=-1, keepdims=True, initial=0.0)
  )
  positive = size >= jnp.finfo(size.dtype).tiny
  root = jax.lax.rsqrt(jnp.where(positive, size, 1.0))
  vectors = vectors * root * root
  square = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.where(positive, square, 1.0))
  inverse = jnp.where(positive, inverse, 0.0)
  direction = vectors * inverse
  # Without `where`, XLA's compiler for CPUs (jaxlib 0.10.2) has wrong results
  # under `jax.vmap`: https://github.com/jax-ml/jax/issues/39103.
  products = jnp.where(positive, direction * tangent, 0.0)
  along = jnp.sum(products, axis=-1, keepdims=True)
  return direction, (tangent - direction * along) * inverse * root * root


class AdditiveProduct(ClassicalScore):
  """A score v . tanh(q' + k') of mapped tokens."""

  score_weight: Shaped[jax.Array, "... A"]

  def pair(self, query, key):
    size = query.shape[-1]
    check_shape("key", key, length=None, size=size, fits="the mapped query")
    return weighted_tanh_sum(query, key, jnp.asarray(self.score_weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Additive(AdditiveProduct):
  """See `attention.additive_score`."""

  query_weight: Shaped[jax.Array, "... Dq A"] = dataclasses.field(
    metadata=MATRIX
  )
  key_weight: Shaped[jax.Array, "... Dk A"] = dataclasses.field(metadata=MATRIX)
  score_weight: Shaped[jax.Array, "... A"] = dataclasses.field(metadata=VECTOR)
  bias: Shaped[jax.Array, "... A"] | None = dataclasses.field(
    default=None, metadata=VECTOR
  )

  def check(self, query, key):
    _check_weight(self.query_weight, "query_weight", query, "query")
    _check_weight(self.key_weight, "key_weight", key, "key")
    size = jnp.shape(self.query_weight)[-1]
    for name in ("key_weight", "score_weight", "bias"):
      array = getattr(self, name)
      if array is not None:
        check_floating(**{name: array})
        check_shape(name, array, size=size, fits="query_weight")

  def map_query(self, query):
    return _widened(_projected(query, self.query_weight, self.bias))

  def map_key(self, key):
    return _widened(_projected(key, self.key_weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Concat(AdditiveProduct):
  """See `attention.concat_score`."""

  weight: Shaped[jax.Array, "... Dq+Dk A"] = dataclasses.field(metadata=MATRIX)
  score_weight: Shaped[jax.Array, "... A"] = dataclasses.field(metadata=VECTOR)

  def check(self, query, key):
    check_floating(weight=self.weight, score_weight=self.score_weight)
    features, both = query.shape[-1] + key.shape[-1], "query and key"
    check_shape("weight", self.weight, features=features, size=None, fits=both)
    size = jnp.shape(self.weight)[-1]
    check_shape("score_weight", self.score_weight, size=size, fits="weight")

  def map_query(self, query):
    weight = self.weight[..., : query.shape[-1], :]
    return _widened(_projected(query, weight))

  def map_key(self, key):
    start = self.weight.shape[-2] - key.shape[-1]
    return _widened(_projected(key, self.weight[..., start:, :]))
