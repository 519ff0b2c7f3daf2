"""Arguments of `attend`: errors that name them, dropout, tracing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, attention_weights, biases, masks, scores
from tests.attention.oracle import CASES, IMPLEMENTATIONS, draw

every_implementation = pytest.mark.parametrize(
  "implementation", IMPLEMENTATIONS
)


def tokens(*shape, dtype=jnp.float32):
  return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
  ("name", "query", "key", "value"),
  [
    ("query", tokens(4), tokens(5, 4), tokens(5, 2)),
    ("query", jnp.ones((3, 4), jnp.int32), tokens(5, 4), tokens(5, 2)),
    ("key", tokens(3, 4), tokens(5, 3), tokens(5, 2)),
    ("key", tokens(2, 3, 4), tokens(3, 5, 4), tokens(5, 2)),
    ("value", tokens(3, 4), tokens(5, 4), tokens(6, 2)),
    ("value", tokens(2, 3, 4), tokens(2, 5, 4), tokens(3, 5, 2)),
  ],
)
def test_shapes_that_do_not_fit_name_the_argument(name, query, key, value):
  with pytest.raises(AssertionError, match=rf"\b{name}\b"):
    attend(query, key, value)


@pytest.mark.parametrize("value", [None, [[1.0, 2.0]] * 5])
def test_tokens_must_be_arrays(value):
  with pytest.raises(TypeError, match="value must be an array"):
    attend(tokens(3, 4), tokens(5, 4), value)


@pytest.mark.parametrize(
  ("error", "message", "arguments"),
  [
    (TypeError, "mask.*bias", {"mask": jnp.zeros((3, 5))}),
    (TypeError, "mask", {"mask": "causal"}),
    (TypeError, "mask", {"mask": biases.alibi(2)}),
    (ValueError, "mask", {"mask": jnp.ones((3, 4), bool)}),
    (ValueError, "mask", {"mask": jnp.ones((2, 3, 5), bool)}),
    (ValueError, "leading", {"mask": masks.padding(jnp.array([1, 2]))}),
    (ValueError, "key_ids", {"mask": masks.segments(*[jnp.arange(3)] * 2)}),
    (TypeError, "bias.*mask", {"bias": jnp.ones((3, 5), bool)}),
    (ValueError, "bias", {"bias": jnp.ones((4, 5))}),
    (ValueError, "bias", {"bias": biases.alibi(2)}),
    (ValueError, "score", {"score": "dot"}),
    (ValueError, "score", {"score": lambda query, key: query}),
    (ValueError, "reference.*'fast'", {"implementation": "fast"}),
    (ValueError, "dropout_rate", {"dropout_rate": 1.5}),
    (ValueError, "rng", {"dropout_rate": 0.5}),
    (TypeError, "rng must be", {"dropout_rate": 0.5, "rng": 0}),
  ],
)
def test_impossible_choices_are_refused(error, message, arguments):
  with pytest.raises(error, match=message):
    attend(tokens(3, 4), tokens(5, 4), tokens(5, 2), **arguments)


@every_implementation
@pytest.mark.parametrize("name", ["scaled_dot", "additive", "closure"])
def test_jit_traces_once(name, implementation):
  chex.clear_trace_counter()
  case = CASES[name]
  parameters = {name: jnp.ones(shape) for name, shape in case.shapes(4).items()}

  @jax.jit
  @chex.assert_max_traces(n=1)
  def run(query, key, mask, parameters):
    return attend(
      query,
      key,
      key,
      score=case.bound(parameters),
      mask=mask,
      implementation=implementation,
    )

  for seed in range(3):
    query, key = draw(seed, (3, 4), (5, 4))
    mask = masks.causal(1) & masks.padding(jnp.asarray(seed + 1))
    run(query, key, mask, parameters)


@every_implementation
def test_scores_and_masks_pass_through_jit_and_vmap(implementation):
  query, key, value = draw(0, (2, 3, 4), (2, 5, 4), (2, 5, 2))
  lengths = jnp.array([2, 5])

  def run(query, key, value, score, mask):
    return attend(
      query, key, value, score=score, mask=mask, implementation=implementation
    )

  whole = run(query, key, value, scores.cosine(3.0), masks.padding(lengths))
  mapped = jax.jit(
    jax.vmap(
      lambda query, key, value, length, score: run(
        query, key, value, score, masks.padding(length)
      ),
      in_axes=(0, 0, 0, 0, None),
    )
  )
  np.testing.assert_allclose(
    mapped(query, key, value, lengths, scores.cosine(3.0)),
    whole,
    rtol=1e-5,
    atol=1e-6,
  )


@every_implementation
def test_dropout_is_inverted_and_leaves_the_lse_alone(implementation):
  query, key = draw(1, (4, 8), (4096, 8))
  value = jnp.ones((4096, 1))
  arguments = {"implementation": implementation, "return_lse": True}
  _, lse = attend(0.1 * query, key, value, **arguments)
  dropped, dropped_lse = attend(
    0.1 * query,
    key,
    value,
    dropout_rate=0.25,
    rng=jax.random.key(0),
    **arguments,
  )
  np.testing.assert_array_equal(lse, dropped_lse)
  np.testing.assert_allclose(dropped, 1.0, atol=0.05)
  assert (abs(dropped - 1.0) > 1e-5).any()
  everything, _ = attend(
    query, key, value, dropout_rate=1.0, rng=jax.random.key(0), **arguments
  )
  assert not everything.any()


@every_implementation
def test_dropped_weights_follow_the_random_key(implementation):
  query, key = draw(2, (3, 4), (5, 4))

  def weights(seed):
    return attend(
      query,
      key,
      jnp.eye(5),
      dropout_rate=0.5,
      rng=jax.random.key(seed),
      implementation=implementation,
    )

  kept = np.asarray(weights(0) > 0)
  np.testing.assert_allclose(
    weights(0)[kept],
    2.0 * np.asarray(attention_weights(query, key))[kept],
    rtol=1e-5,
  )
  np.testing.assert_array_equal(weights(0), weights(0))
  assert (weights(0) != weights(1)).any()


def test_weights_do_not_depend_on_a_value():
  query, key = draw(3, (2, 3, 4), (2, 5, 4))
  np.testing.assert_allclose(
    attention_weights(query, key, mask=masks.causal()),
    attend(query, key, jnp.eye(5), mask=masks.causal()),
    rtol=1e-5,
    atol=1e-6,
  )


def test_scores_without_the_leading_axes_are_refused():
  with pytest.raises(ValueError, match=r"score must return .* it returned"):
    attend(
      tokens(2, 3, 4),
      tokens(2, 5, 4),
      tokens(2, 5, 2),
      score=lambda query, key: jnp.zeros((3, 5)),
    )
