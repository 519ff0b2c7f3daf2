"""NaN, infinite and hidden tokens in the kernels for Hopper GPUs."""

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend, masks, scores
from tests.attention.implementations.pallas.hopper import (
  CASES,
  INTERPRETED,
  MASKED,
  additive,
  arrays,
  check,
  check_hidden_tokens,
  close,
  ignore_nan,
  outputs,
  results,
  rows_of_nan,
)
from tests.matrix import sampled


@ignore_nan
@sampled("channels", [8, 64], default=[64])
def test_nan_and_large_features_of_an_additive_score_in_a_tile(channels):
  tokens = arrays((10, 64), (100, 64), (100, 64))
  tokens[0] = tokens[0].at[3, 3].set(jnp.nan).at[4].multiply(60)
  options = {"score": additive(channels)}
  check(tokens, outputs, **options)


def pairs(*shape, seed=4):
  """Numbers of pairs, of which about a third is -inf."""
  numbers = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(np.where(numbers > 0.5, -np.inf, numbers), jnp.float32)


# Arrays of pairs, for 2 x 2 heads of 70 queries and 100 keys.
OF_PAIRS = {
  "mask": {"mask": pairs(2, 1, 70, 100) < 0.0},
  "mask of all": {"mask": pairs(70, 100) < 0.0},
  "bias": {"bias": pairs(2, 70, 100)},
  "half bias and mask": {
    "bias": pairs(2, 2, 70, 100).astype(jnp.bfloat16),
    "mask": (pairs(1, 2, 70, 100, seed=5) < 0.0) | masks.causal(),
  },
}


@ignore_nan
@sampled("name", ["mask", "bias"], default=["bias"])
def test_hidden_keys_of_nan_or_whose_scores_overflow_change_nothing(name):
  query, key, value = arrays((70, 64), (100, 64), (100, 64))
  query = jnp.full_like(query, 2.0)
  numbers = jnp.where(jnp.arange(100) < 90, 0.0, -jnp.inf)[None]
  options = {"bias": numbers} if name == "bias" else {"mask": numbers == 0.0}
  key = key.at[95].set(3e38).at[92, 3].set(jnp.nan)
  want = check([query, key, value], **options)
  assert np.isfinite(want[1][0]).all()


@ignore_nan
@sampled("number", ["0", "nan", "inf"], default=["nan"])
@sampled("score", ["dot", "additive", "cosine"], default=["dot"])
@sampled("name", [*OF_PAIRS], default=["half bias and mask"])
def test_masks_and_biases_with_numbers_of_pairs(name, score, number):
  """With NaN in a few tokens, which many rows then attend to."""
  tokens = arrays((2, 2, 70, 64), (2, 1, 100, 64), (2, 2, 100, 64))
  tokens[0] = tokens[0].at[0, 0, 66, 3].set(float(number))
  tokens[1] = tokens[1].at[1, 0, 80, 3].set(float(number))
  tokens[2] = tokens[2].at[0, 1, 70, 3].set(float(number))
  options = OF_PAIRS[name] | CASES[score]
  want = check(tokens, **options)
  is_nan = np.isnan(np.asarray(want[1][0]))
  assert number == "0" or 0 < is_nan.sum() < is_nan.size


@ignore_nan
@sampled("number", ["nan", "-inf"], default=["nan"])
@sampled("token", ["query", "key", "value"], default=["key"])
@sampled(
  "name",
  ["causal", "additive window", *MASKED],
  default=[],  # masks and biases with numbers of pairs, above, have NaN too
)
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(
  name, token, number
):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  num_nan = rows_of_nan(tokens, token, number, **(CASES | MASKED)[name])
  is_hidden = name == "hidden by bias" and token != "query"
  assert num_nan == 0 if is_hidden else 0 < num_nan < 70


@ignore_nan
@sampled("number", ["nan", "inf"], default=["nan"])
@sampled(
  "name",
  [
    *("dot", "general", "cosine", "soft cap"),
    *("additive", "projected", "manhattan"),
  ],
  default=[],  # masks and biases with NaN, above, have dot products
)
def test_numbers_of_hidden_tokens_change_nothing(name, number):
  check_hidden_tokens((10, 100, 100), (6, 66), number, **CASES[name])


def roots(query, key):
  """A score with infinite derivatives at a token of zeros."""
  products = query[..., :, None, :] * key[..., None, :, :]
  return 0.1 * (products - jnp.sqrt(jnp.abs(key))[..., None, :, :]).sum(-1)


@ignore_nan
def test_gradients_of_hidden_nan_are_zero_where_derivatives_are_infinite():
  check_hidden_tokens((10, 60, 60), (6, 40), features=16, score=roots)


@ignore_nan
@sampled("name", ["dot", "additive", "manhattan"], default=["dot"])
def test_a_cotangent_of_nan_is_not_replaced(name):
  tokens = arrays((10, 64), (60, 64), (60, 64))
  tokens[2] = tokens[2].at[59].set(jnp.nan)  # whose rows have no derivatives
  cotangent = jnp.ones((10, 64), jnp.bfloat16).at[5, 3].set(jnp.nan)

  def gradients(implementation):
    def context(*tokens):
      return attend(
        *tokens,
        score=CASES[name].get("score", scores.scaled_dot()),
        mask=masks.causal(52),
        implementation=implementation,
      )

    return jax.jit(lambda *x: jax.vjp(context, *x)[1](cotangent))(*tokens)

  got, want = gradients(INTERPRETED), gradients("reference")
  for each, expected in zip(got, want):
    is_nan = np.isnan(np.asarray(expected, np.float32))
    assert is_nan.any()
    assert np.isnan(np.asarray(each, np.float32)[is_nan]).all()


def logarithm_of(score):
  """A wrapper whose result is -inf for half of the pairs."""
  return scores.modified(score, lambda s, i, j: jnp.log(jnp.maximum(s, 0.0)))


@ignore_nan
@sampled("token", ["key", "value"], default=["key"])
def test_minus_infinity_of_a_wrapper_hides_no_nan(token):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  options = {"score": logarithm_of(scores.dot()), "mask": masks.causal(40)}
  rows_of_nan(tokens, token, results=outputs, **options)


@sampled("name", ["dot"], default=[])
def test_without_a_mask_infinite_scores_are_nan_in_gradients_of_values(name):
  query, key, value = arrays((70, 64), (70, 64), (70, 64))
  signs = 1e20 * jnp.sign(query[3])
  tokens = query.at[3].set(signs), key.at[5].set(signs), value
  (_, _, got), _ = results(INTERPRETED, tokens, scores.dot())[0]
  (_, _, want), _ = results("reference", tokens, scores.dot())[0]
  assert np.isnan(np.asarray(want, np.float32)).any()
  close(got, want)
