"""Derivatives of `attend`, for every score and every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks
from tests.attention.comparison import close
from tests.attention.oracle import (
  CASES,
  IMPLEMENTATIONS,
  draw,
  draw_parameters,
  loop_attend,
  loop_scores,
)
from tests.matrix import sampled, scores_and_implementations

# implementations/blockwise/test_shapes.py tests derivatives of a single tile.
every_pair = functools.partial(
  scores_and_implementations, implementations=("reference", "tiles", "kernels")
)
MASK = np.array(
  [
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [1, 1, 0, 1, 1],
  ],
  dtype=bool,
)
STEP = 1e-5


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def problem(name):
  """A scalar of the library, the same in NumPy, a point and a direction."""
  case = CASES[name]
  query, key, value, bias, context_weight, lse_weight = draw(
    5, (2, 3, 4), (2, 5, 4), (2, 5, 2), (3, 5), (2, 3, 2), (2, 3)
  )
  lse_weight[:, 1] = 0.0  # the second row is fully masked: its lse is -inf
  point = {
    "query": query,
    "key": key,
    "value": value,
    "bias": bias,
    "parameters": draw_parameters(case, 4),
  }
  generator = np.random.default_rng(6)
  direction = jax.tree.map(
    lambda array: generator.normal(size=np.shape(array)), point
  )

  def library(point, implementation):
    context, lse = attend(
      point["query"],
      point["key"],
      point["value"],
      score=case.bound(point["parameters"]),
      mask=jnp.asarray(MASK),
      bias=point["bias"],
      implementation=implementation,
      return_lse=True,
    )
    lse = jnp.where(MASK.any(-1), lse, 0.0)
    return jnp.sum(jnp.sin(context) * context_weight) + jnp.sum(
      lse**2 * lse_weight
    )

  def loops(point):
    table = loop_scores(
      case.pair, point["parameters"], point["query"], point["key"]
    )
    context, lse, _ = loop_attend(table + point["bias"], point["value"], MASK)
    lse = np.where(MASK.any(-1), lse, 0.0)
    return np.sum(np.sin(context) * context_weight) + np.sum(
      lse**2 * lse_weight
    )

  point, direction = (jax.tree.map(np.asarray, t) for t in (point, direction))
  return library, loops, point, direction


def moved(point, direction, step):
  return jax.tree.map(lambda x, d: x + step * d, point, direction)


def inner(left, right):
  products = jax.tree.map(lambda x, y: np.sum(x * y), left, right)
  return float(sum(jax.tree.leaves(products)))


@every_pair([("additive", "tiles"), ("cosine", "reference")])
def test_forward_and_reverse_mode_equal_differences_of_loops(
  name, implementation
):
  library, loops, point, direction = problem(name)
  function = functools.partial(library, implementation=implementation)
  expected = (
    loops(moved(point, direction, STEP)) - loops(moved(point, direction, -STEP))
  ) / (2 * STEP)

  @jax.jit
  def derivatives(point, direction):
    value, tangent = jax.jvp(function, (point,), (direction,))
    return value, tangent, jax.grad(function)(point)

  value, tangent, gradient = derivatives(point, direction)
  np.testing.assert_allclose(value, loops(point), rtol=1e-10)
  np.testing.assert_allclose(tangent, expected, rtol=1e-6)
  np.testing.assert_allclose(inner(gradient, direction), expected, rtol=1e-6)


@every_pair([("general", "tiles")])
def test_hessian_vector_product_equals_differences_of_gradients(
  name, implementation
):
  library, _, point, direction = problem(name)
  function = functools.partial(library, implementation=implementation)

  @jax.jit
  def products(point, direction):
    results = jax.jvp(jax.grad(function), (point,), (direction,))
    # Reverse mode of reverse mode computes the same product.
    reverse = jax.grad(
      lambda point: traced_inner(jax.grad(function)(point), direction)
    )(point)
    return *results, reverse

  _, product, reverse = products(point, direction)
  forward, backward = (
    products(moved(point, direction, step), direction)[0]
    for step in (STEP, -STEP)
  )
  jax.tree.map(
    lambda got, ahead, behind: close(
      got, (ahead - behind) / (2 * STEP), rtol=2e-05, atol=1e-7
    ),
    product,
    forward,
    backward,
  )
  close(reverse, product, rtol=1e-8, atol=1e-10)


def traced_inner(left, right):
  products = jax.tree.map(lambda x, y: jnp.sum(x * y), left, right)
  return sum(jax.tree.leaves(products))


@every_pair([("general", "tiles")])
def test_fully_masked_row_has_zero_derivatives(name, implementation):
  query, key, value = draw(8, (3, 4), (5, 4), (5, 2))
  case = CASES[name]
  point = (query, key, value, draw_parameters(case, 4))

  def context_and_lse(query, key, value, parameters):
    context, lse = attend(
      query,
      key,
      value,
      score=case.bound(parameters),
      mask=jnp.asarray(MASK),
      implementation=implementation,
      return_lse=True,
    )
    return context[1], jnp.exp(lse[1])

  def scalar(*point):
    context, share = context_and_lse(*point)
    return jnp.sum(context) + share

  @jax.jit
  def everything(*point):
    ones = jax.tree.map(jnp.ones_like, point)
    gradient = jax.grad(scalar, (0, 1, 2, 3))
    return (
      jax.jvp(context_and_lse, point, ones),
      jax.jvp(gradient, point, ones),
    )

  for leaf in jax.tree.leaves(everything(*point)):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[::2])
def test_causal_output_does_not_depend_on_later_tokens(implementation):
  (tokens,) = draw(10, (6, 4))

  def output(tokens):
    return attend(
      tokens, tokens, tokens, mask=masks.causal(), implementation=implementation
    )

  influence = np.abs(jax.jit(jax.jacobian(output))(tokens)).sum(axis=(1, 3))
  np.testing.assert_array_equal(influence > 0, np.tri(6, dtype=bool))


@sampled("implementation", IMPLEMENTATIONS[::2], default=IMPLEMENTATIONS[2:])
def test_no_tracer_leaks(implementation):
  query, key, value = draw(11, (3, 4), (5, 4), (5, 2))

  @jax.jit
  def loss(weight):
    return jnp.sum(
      attend(
        query,
        key,
        value,
        score=lambda query, key: (query @ weight) @ key.T,
        implementation=implementation,
      )
    )

  with jax.checking_leaks():
    assert jnp.isfinite(jax.grad(loss)(jnp.eye(4))).all()
