"""The score functions, the bound scores and their protocol."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks, scores
from attention.multi_head import grouped_query
from attention.scores.tracing import trace_score
from tests.attention.comparison import close, jitted
from tests.attention.oracle import (
  CASES,
  draw,
  draw_parameters,
  loop_scores,
  single,
)
from tests.matrix import KINDS, sampled

attend = jitted(attention.attend)
NAMED = ["dot", "scaled_dot", "general", "additive", "concat", "cosine"]
every_name = pytest.mark.parametrize("name", NAMED)


def function(name):
  return jitted(getattr(scores, f"{name}_score"))


@every_name
def test_score_function_and_bound_score_equal_a_numpy_loop(name):
  case = CASES[name]
  query, key = draw(0, (2, 1, 3, 4), (3, 5, 4))
  parameters = draw_parameters(case, 4)
  expected = loop_scores(case.pair, parameters, query, key)
  with jax.enable_x64(True):
    bound = jitted(case.bound(parameters))
    for got in (
      function(name)(query, key, **parameters),
      bound(query, key),
    ):
      assert got.dtype == jnp.float64
      close(got, expected, rtol=1e-12, atol=1e-12)


@every_name
def test_functions_return_the_common_dtype_and_bound_scores_float32(name):
  query, key = (jnp.asarray(x, jnp.bfloat16) for x in draw(1, (3, 4), (5, 4)))
  parameters = draw_parameters(CASES[name], 4, dtype=jnp.bfloat16)
  bound = CASES[name].bound(parameters)

  def results(query, key):
    mixed = function(name)(query, key.astype(jnp.float32), **parameters)
    return function(name)(query, key, **parameters), bound(query, key), mixed

  dtypes = [each.dtype for each in jax.eval_shape(results, query, key)]
  assert dtypes == [jnp.bfloat16, jnp.float32, jnp.float32]


@sampled("name", NAMED, default=["general", "concat"])
def test_each_head_can_have_its_own_parameters(name):
  case = CASES[name]
  query, key = draw(2, (2, 3, 5, 4), (2, 1, 7, 4))
  heads = [draw_parameters(case, 4, seed=seed) for seed in range(3)]
  stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *heads)
  together = function(name)(query, key, **stacked)
  for head, parameters in enumerate(heads):
    table = loop_scores(case.pair, parameters, query[:, head], key[:, 0])
    close(together[:, head], table, rtol=1e-5, atol=1e-5)


@sampled("name", CASES, default=KINDS)
def test_with_mapped_keys_equals_the_original_score(name):
  case = CASES[name]
  query, key = single(3, (2, 3, 4), (2, 5, 4))
  score = scores.as_score(
    case.bound(draw_parameters(case, 4, dtype=jnp.float32))
  )
  mapped = scores.with_mapped_keys(score)
  memory = jitted(score.map_key)(key)
  np.testing.assert_array_equal(
    jitted(mapped)(query, memory), jitted(score)(query, key)
  )

  @jax.jit
  def contexts(query, memory, key):
    by_memory = attend(query, memory, key, score=mapped)
    return by_memory, attend(query, key, key, score=score)

  close(*contexts(query, memory, key), rtol=1e-5, atol=1e-6)


@sampled("name", CASES, default=KINDS)
def test_grouped_heads_equal_separate_heads(name):
  case = CASES[name]
  query, key = single(4, (2, 6, 3, 4), (2, 2, 5, 4))
  per_head = name in NAMED
  parameters = (
    jax.tree.map(
      lambda *arrays: np.stack(arrays),
      *[draw_parameters(case, 4, seed, jnp.float32) for seed in range(6)],
    )
    if per_head
    else draw_parameters(case, 4, dtype=jnp.float32)
  )
  score = scores.as_score(case.bound(parameters))

  @jax.jit
  def run(query, key):
    grouped = score.group_heads(2, 3)(
      query.reshape(2, 2, 3, 3, 4), key[:, :, None]
    )
    return grouped, score(query, jnp.repeat(key, 3, axis=1))

  grouped, repeated = run(query, key)
  assert grouped.shape == (2, 2, 3, 3, 5)
  close(grouped.reshape(repeated.shape), repeated, rtol=1e-5, atol=1e-5)


def test_additive_projects_keys_once_for_each_key_value_head():
  query_weight, key_weight, score_weight = single(
    5, (6, 4, 3), (2, 4, 3), (6, 3)
  )
  score = scores.additive(query_weight, key_weight, score_weight)
  grouped = score.group_heads(2, 3)
  assert grouped.map_key(jnp.ones((2, 1, 5, 4))).shape == (2, 1, 5, 3)
  with pytest.raises(ValueError, match="heads"):
    score.group_heads(2, 2)


@sampled("name", NAMED, default=["additive", "cosine"])
def test_bound_score_is_a_pytree_with_gradients(name):
  case = CASES[name]
  query, key = single(6, (3, 4), (5, 4))
  score = case.bound(draw_parameters(case, 4, dtype=jnp.float32))

  def loss(score):
    return jnp.sum(attend(query, key, key, score=score) ** 2)

  gradient = jax.jit(jax.grad(loss))(score)
  assert type(gradient) is type(score)
  for leaf in jax.tree.leaves(gradient):
    assert jnp.isfinite(leaf).all()
    assert leaf.any()


def test_callable_pytree_keeps_its_leaves():
  weight = jnp.eye(4)
  partial = jax.tree_util.Partial(
    lambda weight, query, key: (query @ weight) @ key.T, weight
  )
  score = scores.as_score(partial)
  assert len(jax.tree.leaves(score)) == 1
  query, key = single(7, (3, 4), (5, 4))
  run = jax.jit(lambda score: score(query, key))
  np.testing.assert_allclose(run(score), query @ key.T, rtol=1e-5)
  assert not jax.tree.leaves(scores.as_score(lambda query, key: query))


def test_as_score_converts_score_functions_to_bound_scores():
  for name in ("dot", "scaled_dot", "cosine"):
    bound = scores.as_score(getattr(scores, f"{name}_score"))
    assert type(bound) is type(getattr(scores, name)())
  with pytest.raises(ValueError, match="score"):
    scores.as_score(3)
  with pytest.raises(ValueError, match="as_score"):
    scores.with_mapped_keys(lambda query, key: query)


def test_scale_replaces_the_default():
  query, key = single(8, (3, 4), (5, 4))
  got = function("scaled_dot")(query, key, 2.0)
  close(got, 2.0 * np.asarray(query) @ np.asarray(key).T, rtol=1e-5, atol=1e-6)


def test_cosine_of_a_zero_token_is_zero_with_finite_derivatives():
  query = np.zeros((1, 3), np.float32)
  key = np.array([[0.0], [1.0]], np.float32) * np.ones((2, 3), np.float32)

  def total(query, key):
    return jnp.sum(scores.cosine_score(query, key, 5.0) ** 2)

  @jax.jit
  def derivatives(query, key):
    value, gradient = jax.value_and_grad(total, (0, 1))(query, key)
    return value, gradient, jax.hessian(total)(query, key)

  value, *others = derivatives(query, key)
  assert value == 0.0
  for leaf in jax.tree.leaves(others):
    assert np.isfinite(leaf).all()
  ones = np.ones((1, 3), np.float32)
  small = function("cosine")(np.float32(1e-8) * ones, ones)
  close(small, 1.0, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("argument", "name", "parameters"),
  [
    ("key", "dot", []),
    ("key", "scaled_dot", []),
    ("key", "cosine", []),
    ("weight", "general", [(4, 4)]),
    ("weight", "general", [(3, 3)]),
    ("query_weight", "additive", [(3, 2), (3, 2), (2,)]),
    ("key_weight", "additive", [(4, 2), (4, 2), (2,)]),
    ("key_weight", "additive", [(4, 2), (3, 3), (2,)]),
    ("score_weight", "additive", [(4, 2), (3, 2), (3,)]),
    ("bias", "additive", [(4, 2), (3, 2), (2,), (3,)]),
    ("weight", "concat", [(8, 2), (2,)]),
    ("score_weight", "concat", [(7, 2), (3,)]),
  ],
)
def test_errors_name_the_argument(argument, name, parameters):
  parameters = [jnp.ones(shape) for shape in parameters]
  with pytest.raises(AssertionError, match=rf"^{argument} has"):
    function(name)(jnp.ones((5, 4)), jnp.ones((6, 3)), *parameters)


def test_integer_tokens_are_rejected():
  with pytest.raises(AssertionError, match="query"):
    scores.dot_score(jnp.ones((2, 3), int), jnp.ones((2, 3)))


class Sharp(scores.Score):
  """A score that is neither a dataclass nor hashable."""

  __hash__ = None

  def __init__(self, sharpness):
    self.sharpness = sharpness

  def __eq__(self, other):
    return self.sharpness == other.sharpness

  def pair(self, query, key):
    return self.sharpness * (query @ key.mT)


def test_grouped_heads_keep_the_attributes_of_a_custom_score():
  query, key = draw(20, (4, 3, 2), (2, 5, 2))
  options = {"score": Sharp(5.0), "mask": None, "bias": None}
  got = jitted(grouped_query.attend_heads)(query, key, key, **options)[0]
  want = attend(
    query, key.repeat(2, 0), key.repeat(2, 0), score=scores.scaled_dot(5.0)
  )
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_score_may_be_an_unhashable_callable():
  class Scaled:
    __hash__ = None

    def __call__(self, query, key):
      return 2.0 * (query @ key.mT)

  query, key = draw(21, (3, 2), (5, 2))
  np.testing.assert_allclose(
    attend(query, key, key, score=Scaled()),
    attend(query, key, key, score=scores.scaled_dot(2.0)),
    atol=1e-6,
  )


@pytest.mark.parametrize(
  ("score", "message"),
  [
    (scores.cosine, r"the class Cosine; call it .*: scores\.cosine\(\)$"),
    (scores.shaw, r"the class Shaw; .*: Shaw\(relative_keys\)$"),
    (
      scores.additive_score,
      r"takes \(query, key\), got a function of \(query, key, query_weight,"
      r" .*: scores\.additive\(query_weight, key_weight, score_weight\)$",
    ),
    (lambda query: query, r"takes \(query, key\), .* of \(query\)$"),
    (
      lambda query, key, weight: query,
      r"of \(query, key, weight\); bind .* functools\.partial$",
    ),
    (scores.as_score, r"got a function of \(score\)$"),
  ],
)
def test_score_that_cannot_be_called_with_query_and_key_is_refused(
  score, message
):
  with pytest.raises(ValueError, match=message):
    scores.as_score(score)


def test_numpy_scale_does_not_promote_the_tokens():
  query = jnp.ones((3, 4), jnp.bfloat16)
  score = scores.scaled_dot(1.0 / np.sqrt(4))
  assert score.map_query(query).dtype == jnp.bfloat16


def test_elements_per_pair_of_a_score():
  gap = scores.as_score(lambda q, k: -abs(q[:, None] - k[None]).sum(-1))
  for length in (1, 40):
    query, key = jnp.ones((length, 8)), jnp.ones((40, 8))
    assert trace_score(scores.scaled_dot(), query, key)[1] == 1
  assert trace_score(gap, query, key)[1] == 8


def test_unused_cache_entries_of_mapped_keys_have_zero_gradient():
  query, key, weight = draw(22, (3, 4), (5, 4), (4,))
  score = scores.additive(jnp.eye(4), jnp.eye(4), weight)
  memory = jnp.concatenate([score.map_key(key), jnp.zeros((2, 4))])

  def loss(query, memory):
    context = attend(
      query,
      memory,
      jnp.ones((7, 2)).cumsum(0),
      score=scores.with_mapped_keys(score),
      mask=masks.padding(5),
    )
    return jnp.sum(context)

  gradients = jax.jit(jax.grad(loss, (0, 1)))(query, memory)
  assert all(jnp.isfinite(each).all() for each in gradients)
  np.testing.assert_array_equal(gradients[1][5:], 0.0)
