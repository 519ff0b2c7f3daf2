"""Luong's location-based score and local attention."""

import dataclasses
from typing import Annotated as Shaped
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.head_parameters import MATRIX, SCALAR, VECTOR
from attention.arrays.matmul import inner_products
from attention.checks import check_floating, check_numbers, check_shape
from attention.scores.base import Score, Wrapper
from attention.scores.relative import joined


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Location(Score):
  """Luong's location-based score, W_a h_t: one number for each key position.

  It depends on the query and on the key's position, not on the key, in which
  NaN therefore changes nothing. Keys at position L and after are hidden. See
  "Effective Approaches to Attention-based Neural Machine Translation", Luong et
  al., 2015, equation 8 (https://arxiv.org/abs/1508.04025).

  Attributes:
    weight: [..., L, Dq], the paper's W_a, for positions 0 to L - 1.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> weight = jnp.array([[1.0, 0.0], [0.0, 1.0]])  # two positions
    >>> score = scores.location(weight)
    >>> score(jnp.array([[3.0, 4.0]]), jnp.zeros((3, 2)))
    Array([[  3.,   4., -inf]], dtype=float32)
  """

  weight: Shaped[jax.Array, "... L D"] = dataclasses.field(metadata=MATRIX)

  @property
  def reads_keys(self):
    return False

  def check(self, query, key):
    check_floating(weight=self.weight)
    features = query.shape[-1]
    check_shape(
      "weight", self.weight, positions=None, features=features, fits="query"
    )
    if not self.weight.shape[-2]:
      raise AssertionError(
        f"weight has no positions: its shape is {self.weight.shape}"
      )

  def pair_at(self, query, key, positions):
    rows = jnp.take(self.weight, positions.key, axis=-2, mode="clip")
    rows, query = axes.aligned(rows, query)
    scores = inner_products(query, rows)
    _, at = positions.broadcast(scores.ndim)
    shape = jnp.broadcast_shapes(scores.shape[:-2], key.shape[:-2])
    scores = jnp.where(at < self.weight.shape[-2], scores, -jnp.inf)
    return jnp.broadcast_to(scores, (*shape, *scores.shape[-2:]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Local(Wrapper):
  """Local attention: the keys in a window around a position p of the query.

  Without parameters it is the paper's local-m, with p the query's position; if
  all queries are known, `masks.sliding_window(window, window)` has the same
  effect and skips tiles. With parameters it is local-p, where p = S sigmoid(v .
  tanh(W q)) is predicted. Its weights are multiplied by a Gaussian,

      weights[j] = softmax_j(score) exp(-(j - p)^2 / (2 sigma^2)),

  with sigma = window / 2, so they add up to less than 1. See "Effective
  Approaches to Attention-based Neural Machine Translation", Luong et al., 2015,
  section 3.2 (https://arxiv.org/abs/1508.04025).

  The paper defines local-p for a source, whose length S is known. In causal
  self-attention the number of keys grows with every token. With `causal`, S is
  therefore the number of keys up to the query's own, t + 1 for the query at
  position t. This is not in the paper. The scores of a query do not depend on
  later tokens or on the size of a cache, so decoding equals teacher forcing.

  Called as a function, it returns score - (j - p)^2 / (2 sigma^2), -inf outside
  of the window. `attend` divides the exponentials of these by the sum of the
  exponentials of the score alone. This needs softmax.

  Attributes:
    score: the score of contents.
    window: the paper's D, the largest distance from p.
    query_weight: [..., Dq, A], the paper's W_p, or None for local-m.
    position_weight: [..., A], the paper's v_p, or None for local-m.
    length: S, a number or an array [...] over leading axes, for instance the
      lengths [B] of scores [B, T, S]; None means the number of keys.
    causal: whether S is the query's position + 1, for local-p.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attention_weights, scores
    >>> tokens = jnp.ones((3, 2))
    >>> attention_weights(tokens, tokens, score=scores.local(scores.dot(), 1))
    Array([[0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333],
           [0.   , 0.5  , 0.5  ]], dtype=float32)
  """

  window: float = dataclasses.field(metadata={"static": True})
  query_weight: Shaped[jax.Array, "... D P"] | None = dataclasses.field(
    default=None, metadata=MATRIX
  )
  position_weight: Shaped[jax.Array, "... P"] | None = dataclasses.field(
    default=None, metadata=VECTOR
  )
  length: float | Shaped[jax.Array, "..."] | None = dataclasses.field(
    default=None, metadata=SCALAR
  )
  causal: bool = dataclasses.field(default=False, metadata={"static": True})
  has_gaussian: bool = dataclasses.field(
    default=True, metadata={"static": True}
  )

  @property
  def reads_positions(self):
    return True

  @property
  def denominator(self):
    if self.query_weight is None or not self.has_gaussian:
      return super().denominator
    return dataclasses.replace(self, has_gaussian=False)

  def check(self, query, key):
    check_numbers(window=self.window)
    if self.window < 0:
      raise ValueError(f"window must be at least 0, got {self.window}")
    if self.query_weight is not None and not self.window:
      raise ValueError(
        "window must be above 0 for local-p, whose Gaussian has the standard "
        "deviation window / 2"
      )
    if (self.query_weight is None) != (self.position_weight is None):
      raise AssertionError(
        "local-p needs both query_weight and position_weight, local-m neither"
      )
    if self.causal and self.length is not None:
      raise AssertionError(
        "length must be None if causal: S is the query's position + 1"
      )
    if self.query_weight is not None:
      check_floating(
        query_weight=self.query_weight, position_weight=self.position_weight
      )
      features = query.shape[-1]
      check_shape(
        "query_weight",
        self.query_weight,
        features=features,
        size=None,
        fits="query",
      )
      check_shape(
        "position_weight",
        self.position_weight,
        size=self.query_weight.shape[-1],
        fits="query_weight",
      )
    super().check(query, key)

  def map_query(self, query):
    """The mapped query, followed by features whose sum is p / S."""
    mapped = self.score.map_query(query)
    if self.query_weight is None:
      return mapped
    # The score may depend on the dtype of mapped tokens.
    return joined(mapped, _parts(self.shares(query), mapped.dtype))

  def shares(self, query: jax.Array) -> jax.Array:
    """The predicted p / S of local-p, from queries [..., T, Dq], [..., T]."""
    # A position of a long source needs more digits than bfloat16 has.
    product = jnp.einsum(
      "...td,...da->...ta",
      query,
      self.query_weight,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.promote_types(query.dtype, jnp.float32),
    )
    weight = jnp.asarray(self.position_weight)[..., None, :]
    hidden, weight = axes.aligned(jnp.tanh(product), weight)
    return jax.nn.sigmoid(jnp.sum(hidden * weight, axis=-1))

  def inner_tokens(self, query, key):
    if self.query_weight is None:
      return query, key
    return query[..., : -_num_parts(query.dtype)], key

  def pair_at(self, query, key, positions):
    scores = super().pair_at(query, key, positions)
    if self.query_weight is None:
      center, at = positions.broadcast(scores.ndim)
    else:
      parts = query[..., -_num_parts(query.dtype) :]
      wide = jnp.promote_types(parts.dtype, jnp.float32)
      fraction = jnp.sum(parts.astype(wide), axis=-1, keepdims=True)
      length = jnp.asarray(self._length(positions), fraction.dtype)
      fraction, length, scores = axes.aligned(fraction, length, scores)
      center = fraction * length
      _, at = positions.broadcast(scores.ndim)
    distance = (at.astype(center.dtype) - center).astype(scores.dtype)
    if self.query_weight is not None and self.has_gaussian:
      scores = scores - 2.0 * jnp.square(distance / self.window)
    return jnp.where(abs(distance) <= self.window, scores, -jnp.inf)

  def _length(self, positions):
    """S for each query of local-p, [..., t or 1, 1]."""
    if self.causal:
      return positions.query[:, None] + 1
    length = positions.key_length if self.length is None else self.length
    return jnp.asarray(length)[..., None, None]


def _num_parts(dtype: Any) -> int:
  """The numbers of a dtype whose sum has the digits of float32."""
  return 3 if jnp.dtype(dtype).itemsize == 2 else 1


def _parts(numbers: jax.Array, dtype: Any) -> jax.Array:
  """Numbers [...] as sums of numbers of a dtype, [..., n]."""
  parts = [numbers.astype(dtype)]
  for _ in range(_num_parts(dtype) - 1):
    rest = numbers - sum(each.astype(numbers.dtype) for each in parts)
    # The first part has the derivatives.
    parts.append(jax.lax.stop_gradient(rest.astype(dtype)))
  return jnp.concatenate([each[..., None] for each in parts], axis=-1)
