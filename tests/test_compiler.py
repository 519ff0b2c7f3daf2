"""Errors of the installed XLA, and that this library's programs are right.

jaxlib 0.10.2 compiles some sums for CPUs wrongly. The first tests reproduce
the reports; they say which error the installed version has. The others run
programs of this library that are closest to them, and must pass.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks, scores

# https://github.com/jax-ml/jax/issues/40412
_SIZE_ONE_AXIS = """
import jax
import jax.numpy as jnp
x = jnp.ones((3, 1, 2, 2, 8, 8, 8))
assert (jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(x, x) == 2.0).all()
"""
# https://github.com/jax-ml/jax/issues/39257
_RANK_EIGHT = """
import jax
import jax.numpy as jnp
def run(a, b):
  product = jnp.sum(a[..., None, None, None, None, None] * b, axis=2)
  return jnp.log(jnp.maximum(product, 1e-16))
result = jax.jit(run)(jnp.ones((10, 4, 6)), jnp.ones((10, 4, 6, *[9] * 5)))
assert abs(result - jnp.log(6.0)).max() < 1e-5
"""


def test_vmapped_matrix_vector_product_with_sum():
  """https://github.com/jax-ml/jax/issues/39103."""
  rows = np.zeros((32_769, 3), np.float32)
  rows[:, 0] = np.arange(32_769)
  matrix = jnp.eye(3)

  @jax.jit
  def run(rows):
    return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(rows)

  if float(run(rows)[-1]) != 32_768.0**2:
    pytest.xfail("jaxlib has jax issue 39103")


def test_sum_of_two_products_of_which_one_has_a_constant():
  """Only if a sum of rows is computed with them, and in bfloat16."""
  half = jnp.bfloat16

  def run(weights, numbers, value):
    total = jnp.sum(weights * numbers, axis=-1, keepdims=True)
    product = (weights * (numbers - total)).astype(half) @ value
    return product + weights.astype(half) @ jnp.zeros((64, 64), half)

  ones = jnp.ones((64, 64))
  result = jax.jit(run)(ones, ones, ones.astype(half))
  if not bool(jnp.all(result == 64.0 * (1.0 - 64.0))):
    pytest.xfail("jaxlib multiplies by other numbers than the constant")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("issue", "program"), [(40412, _SIZE_ONE_AXIS), (39257, _RANK_EIGHT)]
)
def test_sums_of_high_rank(issue, program):
  # A process of its own: the error is a segmentation fault, or a hang.
  try:
    done = subprocess.run(
      [sys.executable, "-c", program], capture_output=True, timeout=600
    )
  except subprocess.TimeoutExpired:
    pytest.xfail(f"jaxlib has jax issue {issue}")
  if done.returncode < 0:
    pytest.xfail(f"jaxlib has jax issue {issue}")
  assert done.returncode == 0, done.stderr


def dense(table, value):
  weights = np.exp(table - table.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True) @ value


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("name", ["general", "cosine"])
def test_vmapped_queries_of_three_features(name, implementation):
  """The maps of single tokens that issue 39103 is about."""
  generator = np.random.default_rng(0)
  query = generator.normal(size=(32_769, 1, 3))
  key, weight = generator.normal(size=(5, 3)), generator.normal(size=(3, 3))
  score = scores.general(weight) if name == "general" else scores.cosine(2.0)

  @jax.jit
  def run(query, key):
    return jax.vmap(
      lambda query: attend(
        query, key, key, score=score, implementation=implementation
      )
    )(query)

  context = run(query.astype("f4"), key.astype("f4"))
  if name == "general":
    table = query @ weight @ key.T
  else:
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    table = 2.0 * unit[0] @ unit[1].T
  np.testing.assert_allclose(context, dense(table, key), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_leading_axes_of_size_one_up_to_rank_seven(implementation):
  """Products and sums of rank 7 and 8, which issues 39257 and 40412 are about.

  A crash of the worker is a failure of this test.
  """
  generator = np.random.default_rng(0)
  query = generator.normal(size=(3, 1, 2, 2, 4, 5, 8))
  key = generator.normal(size=(3, 1, 2, 2, 4, 7, 8))
  weight = generator.normal(size=8)
  score = scores.additive(jnp.eye(8), jnp.eye(8), weight.astype("f4"))

  def run(query, key):
    context = attend(
      query, key, key, score=score, implementation=implementation
    )
    return jnp.sum(context), context

  gradient, context = jax.jit(jax.grad(run, has_aux=True))(
    query.astype("f4"), key.astype("f4")
  )
  table = np.tanh(query[..., :, None, :] + key[..., None, :, :]) @ weight
  np.testing.assert_allclose(context, dense(table, key), rtol=1e-3, atol=1e-4)
  assert np.isfinite(gradient).all()


@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_tangents_of_some_tokens_of_bfloat16(mask):
  """The sums of products of the test of two products."""
  generator = np.random.default_rng(0)
  tokens = [generator.normal(size=(64, 64)) for _ in range(3)]

  def tangent(dtype):
    query, *others = (jnp.asarray(each, dtype) for each in tokens)

    def context(query):
      options = {"mask": mask, "implementation": "reference"}
      return attend(query, *others, **options).astype(jnp.float32)

    return jax.jit(lambda query: jax.jvp(context, [query], [query])[1])(query)

  got, want = map(tangent, (jnp.bfloat16, jnp.float32))
  np.testing.assert_allclose(got, want, atol=0.03)
