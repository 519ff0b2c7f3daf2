"""Values of `attend`, for every score and every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
from tests.attention.comparison import close, jitted
from tests.attention.oracle import (
  CASES,
  IMPLEMENTATIONS,
  draw,
  draw_parameters,
  loop_attend,
  loop_scores,
  single,
)
from tests.matrix import (
  KINDS,
  each_implementation,
  scores_and_implementations,
)

attend = jitted(attention.attend)
attention_weights = jitted(attention.attention_weights)

FEW = [("general", "tiles"), ("additive", "one_tile"), ("closure", "reference")]


def compare(name, implementation, shapes, mask=None, bias=None, seed=0):
  query, key, value = draw(seed, *shapes)
  case = CASES[name]
  parameters = draw_parameters(case, query.shape[-1])
  table = loop_scores(case.pair, parameters, query, key)
  table = table if bias is None else table + bias
  expected = loop_attend(table, value, mask)

  @jax.jit
  def run(query, key, value, mask, bias, parameters):
    arguments = {"score": case.bound(parameters), "mask": mask, "bias": bias}
    context, lse = attend(
      query,
      key,
      value,
      implementation=implementation,
      return_lse=True,
      **arguments,
    )
    if implementation != "reference":  # only the reference computes weights
      return context, lse, expected[2]
    return context, lse, attention_weights(query, key, **arguments)

  with jax.enable_x64(True):
    context, lse, weights = run(query, key, value, mask, bias, parameters)
    assert context.dtype == lse.dtype == jnp.float64
    assert weights.dtype == jnp.float64
  weights = np.broadcast_to(weights, expected[2].shape)
  close((context, lse, weights), expected, rtol=1e-10, atol=1e-12)


@scores_and_implementations(
  [
    *((name, "reference") for name in CASES),
    # Tiles of the other scores have the products or the sums of these.
    *((name, "tiles") for name in (*KINDS, "cosine")),
    ("general", "one_tile"),
  ],
  implementations=("reference", "one_tile", "tiles"),
)
def test_value_equals_numpy_loop(name, implementation):
  """Every score by the reference, and one of each kind by tiles."""
  generator = np.random.default_rng(0)
  mask = generator.random((5, 7)) < 0.6
  bias = generator.normal(size=(2, 1, 5, 7))
  shapes = ((2, 1, 5, 3), (1, 2, 7, 3), (2, 2, 7, 2))
  compare(name, implementation, shapes, mask, bias)


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_value_equals_numpy_loop_for_any_shape(name, implementation, data):
  lengths = st.sampled_from([1, 2, 3, 5, 7, 11])
  length, key_length = data.draw(lengths), data.draw(lengths)
  features, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
  generator = np.random.default_rng(data.draw(st.integers(0, 99)))
  shape = (length, key_length)
  mask = bias = None
  if data.draw(st.booleans()):
    mask = generator.random(shape) < 0.6
  if data.draw(st.booleans()):
    bias = generator.normal(size=(2, 1, *shape))
  shapes = (
    (2, 1, length, features),
    (1, 2, key_length, features),
    (2, 2, key_length, size),
  )
  compare(name, implementation, shapes, mask, bias)


@scores_and_implementations([("closure", "tiles")])
def test_one_query_or_one_key(name, implementation):
  for length, key_length in [(1, 1), (1, 7), (5, 1)]:
    shapes = ((length, 3), (key_length, 3), (key_length, 2))
    compare(name, implementation, shapes)


@scores_and_implementations()
def test_context_without_keys_is_zero(name, implementation):
  compare(name, implementation, ((2, 3, 4), (2, 0, 4), (2, 0, 5)))
  compare(
    name,
    implementation,
    ((2, 3, 4), (2, 0, 4), (2, 0, 5)),
    mask=np.ones((3, 0), bool),
  )


@scores_and_implementations()
def test_without_queries(name, implementation):
  compare(name, implementation, ((0, 4), (3, 4), (3, 5)))


@scores_and_implementations([("general", "tiles")])
def test_arguments_of_different_ranks_broadcast(name, implementation):
  compare(name, implementation, ((3, 2, 5, 4), (7, 4), (2, 7, 3)))
  compare(name, implementation, ((5, 4), (2, 7, 4), (3, 2, 7, 3)))


@scores_and_implementations(FEW)
def test_grouped_queries_equal_repeated_keys(name, implementation):
  query, key, value = draw(1, (2, 4, 5, 6), (2, 1, 7, 6), (2, 1, 7, 2))
  case = CASES[name]
  parameters = draw_parameters(case, 6)
  grouped = attend(
    query,
    key,
    value,
    score=case.bound(parameters),
    implementation=implementation,
  )
  key, value = (np.repeat(each, 4, axis=1) for each in (key, value))
  table = loop_scores(case.pair, parameters, query, key)
  close(grouped, loop_attend(table, value)[0], rtol=1e-5, atol=1e-6)


@scores_and_implementations([("closure", "tiles")])
def test_permutation_equivariance(name, implementation):
  query, key, value = draw(2, (2, 5, 3), (2, 7, 3), (2, 7, 4))
  score = CASES[name].bound(draw_parameters(CASES[name], 3))
  rows, columns = np.random.default_rng(0).permutation(5), [3, 1, 6, 0, 5, 2, 4]

  run = jax.jit(
    functools.partial(attend, score=score, implementation=implementation)
  )
  close(
    run(query[:, rows], key[:, columns], value[:, columns]),
    run(query, key, value)[:, rows],
    rtol=1e-5,
    atol=1e-6,
  )


@scores_and_implementations([("general", "tiles"), ("additive", "tiles")])
def test_bfloat16_has_float32_statistics(name, implementation):
  query, key, value = draw(
    3, (2, 5, 8), (2, 11, 8), (2, 11, 4), dtype=jnp.bfloat16
  )
  case = CASES[name]
  parameters = {
    name: jnp.asarray(array * 0.3, jnp.bfloat16)
    for name, array in draw_parameters(case, 8).items()
  }
  context, lse = attend(
    query,
    key,
    value,
    score=case.bound(parameters),
    implementation=implementation,
    return_lse=True,
  )
  assert context.dtype == jnp.bfloat16
  assert lse.dtype == jnp.float32
  wide = [np.asarray(array, np.float64) for array in (query, key, value)]
  parameters = {n: np.asarray(a, np.float64) for n, a in parameters.items()}
  table = loop_scores(case.pair, parameters, *wide[:2])
  expected = loop_attend(table, wide[2])
  close(np.asarray(context, np.float64), expected[0], rtol=0.05, atol=0.05)
  close(lse, expected[1], rtol=0.02, atol=0.05)


@each_implementation()
def test_large_scores_do_not_overflow(implementation):
  query, key, value = single(4, (3, 4), (5, 4), (5, 2))
  context = attend(1e4 * query, 1e4 * key, value, implementation=implementation)
  nearest = jnp.argmax(query @ key.T, axis=-1)
  np.testing.assert_allclose(context, value[nearest], rtol=1e-6)


def test_worked_example_of_self_attention():
  tokens = np.array([[1.0, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]])
  query = tokens @ [[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]]
  key = tokens @ [[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]]
  value = tokens @ [[0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]]
  np.testing.assert_allclose(
    attention_weights(query, key),  # printed to five digits
    [
      [0.13613, 0.43194, 0.43194],
      [0.00089045, 0.90884, 0.090267],
      [0.0074449, 0.75471, 0.23785],
    ],
    rtol=5e-5,
  )
  np.testing.assert_allclose(
    attend(query, key, value),
    [
      [1.8639, 6.3194, 1.7042],
      [1.9991, 7.8141, 0.2735],
      [1.9926, 7.4796, 0.7359],
    ],
    rtol=2e-4,
  )
