"""Additive scores keep their digits for projections of any size."""

import jax
import jax.numpy as jnp
import numpy as np

from attention import scores
from attention.scores import additive_kernel
from tests.attention.oracle import draw
from tests.matrix import sampled, sampled_product

CHANNELS = 16
SIZES_AND_LENGTHS = [
  (size, *lengths)
  for size in (1e-6, 0.01, 2.0, 150.0, 1e4)
  for lengths in ((150, 140), (20, 30), (1, 40))
]


def given(size, length, key_length):
  """Projections of `size` whose sums are of any size below."""
  query, key, weight = draw(
    7, (length, CHANNELS), (key_length, CHANNELS), (CHANNELS,)
  )
  query, key = np.float32(size * query), np.float32(size * key)
  # Sums of large projections of opposite signs, where tanh is steep.
  rows = min(3, length)
  key[:rows] = np.float32(-query[:rows] + 0.3 * min(size, 1.0))
  return query, key, np.float32(weight)


@jax.jit
def scores_and_derivatives(query, key, weight, direction):
  def total(*arguments):
    scores = additive_kernel.weighted_tanh_sum(*arguments)
    return jnp.sum(scores), scores

  gradients, scores = jax.grad(total, (0, 1, 2), has_aux=True)(
    query, key, weight
  )
  tangent = jax.jvp(
    lambda query: additive_kernel.weighted_tanh_sum(query, key, weight),
    (query,),
    (direction,),
  )[1]
  return scores, tangent, gradients


# A loop over channels, a small array of pairs and channels, a decoder's query.
@sampled(
  ("size", "length", "key_length"),
  SIZES_AND_LENGTHS,
  default=[
    (size, length, key_length)
    for size, length, key_length in SIZES_AND_LENGTHS
    if length < 150 or size in (1e-6, 1e4)
  ],
)
def test_scores_and_derivatives_equal_float64(size, length, key_length):
  query, key, weight = given(size, length, key_length)
  direction = np.float32(draw(8, query.shape)[0])

  found = scores_and_derivatives(
    *map(jnp.asarray, (query, key, weight, direction))
  )
  query, key, weight, direction = map(
    np.float64, (query, key, weight, direction)
  )
  hidden = np.tanh(query[:, None] + key[None])
  slopes = (1.0 - hidden**2) * weight
  expected = (
    hidden @ weight,
    np.einsum("tsa,ta->ts", slopes, direction),
    (slopes.sum(1), slopes.sum(0), hidden.sum((0, 1))),
  )
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    scale = max(np.abs(want).max(), 1e-30)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=3e-6 * scale)


@jax.jit
def curvature(query, key, weight):
  def total(query):
    def step(total, _):
      scores = additive_kernel.weighted_tanh_sum(query, key, weight)
      return total + jnp.sum(scores**2), None

    return jax.lax.scan(step, jnp.zeros((), query.dtype), length=2)[0]

  ones = jnp.ones_like(query)
  return jax.jvp(jax.value_and_grad(total), (query,), (ones,))


# On both sides of the size up to which exponentials are used.
@sampled_product(
  ("size", "channels"), [(9.9, 10.1), (16, 17)], default=[(9.9, 17), (10.1, 17)]
)
def test_second_derivatives_in_a_scan_equal_the_formula(size, channels):
  shapes = (160, channels), (120, channels), (channels,)  # not in one array
  query, key, weight = draw(9, *shapes)
  query, key = np.clip(size * query, -size, size), np.clip(key, -size, size)
  query[0], key[0] = size, size  # the largest divisors

  found = curvature(*map(np.float32, (query, key, weight)))
  hidden = np.tanh(query[:, None] + key[None])
  slopes = (1.0 - hidden**2) * weight
  curves = (
    slopes.sum(-1, keepdims=True) - 2.0 * hidden * (hidden @ weight)[..., None]
  )
  gradient = 4.0 * np.sum((hidden @ weight)[..., None] * slopes, axis=1)
  expected = (
    *(2.0 * np.sum((hidden @ weight) ** 2), gradient),
    *(gradient.sum(), 4.0 * np.sum(slopes * curves, axis=1)),
  )
  for got, want in zip(jax.tree.leaves(found), expected):
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-5 * scale)


def test_all_examples_of_vmap_are_accurate():
  small, large = given(1e-3, 150, 140), given(200.0, 150, 140)
  batch = [jnp.stack(each) for each in zip(small, large)]
  mapped = jax.jit(jax.vmap(additive_kernel.weighted_tanh_sum))(*batch)
  for found, point in zip(mapped, (small, large)):
    expected = np.tanh(
      np.float64(point[0])[:, None] + np.float64(point[1])[None]
    ) @ np.float64(point[2])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * scale)


def test_vmap_runs_one_form_only():
  batch = [jnp.stack([each] * 2) for each in given(1.0, 150, 140)]
  closed = jax.make_jaxpr(jax.vmap(additive_kernel.weighted_tanh_sum))(*batch)
  assert "cond[" in str(closed)


def test_gradient_of_many_pairs_with_two_leading_axes_is_traced():
  """All platforms' branches have results of one shape."""
  score = scores.additive(jnp.ones((8, 6)), jnp.ones((8, 6)), jnp.ones(6))

  def loss(tokens):
    return jnp.sum(score(tokens, tokens))

  tokens = jax.ShapeDtypeStruct((2, 3, 150, 8), jnp.float32)
  gradient = jax.eval_shape(jax.grad(loss), tokens)
  assert gradient.shape == tokens.shape
