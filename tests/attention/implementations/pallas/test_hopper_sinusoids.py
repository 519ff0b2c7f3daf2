"""Transformer-XL's score in the kernels for Hopper GPUs, interpreted."""

import jax
import jax.numpy as jnp
import pytest

from attention import attend, masks, scores
from tests.attention.implementations.pallas.hopper import (
  INTERPRETED,
  arrays,
  check,
  check_hidden_tokens,
  close,
  ignore_nan,
  outputs,
  rows_of_nan,
)
from tests.matrix import sampled


def transformer_xl(features=64, sinusoids=64, heads=(), dtype=jnp.float32):
  shapes = (*heads, sinusoids, features), (*heads, features), (*heads, features)
  numbers = [0.1 * x for x in arrays(*shapes, seed=7, dtype=jnp.float32)]
  return scores.transformer_xl(*(x.astype(dtype) for x in numbers))


CASES = {
  "sinusoids of 64": {"score": transformer_xl()},
  "sinusoids of 128": {"score": transformer_xl(sinusoids=128)},
  "half, of each head": {
    "score": transformer_xl(sinusoids=128, heads=(2,), dtype=jnp.bfloat16),
    "mask": masks.causal(40),
  },
  "shifted": {"score": scores.soft_cap(transformer_xl().shifted(20), 5.0)},
}


@sampled("name", [*CASES], default=["half, of each head"])
def test_results_and_gradients_equal_the_reference(name, launched):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  check(tokens, **CASES[name])
  # Forward, queries, keys, and the sum of the gradients of arrays.
  assert len(launched) == 4


@sampled("sinusoids", [64, 128], default=[])
def test_tokens_of_128_features(sinusoids):
  tokens = arrays((70, 128), (100, 128), (100, 64))
  options = {"score": transformer_xl(128, sinusoids), "mask": masks.causal(40)}
  check(tokens, **options)


@sampled("mask", [None, masks.causal(40)], default=[])
def test_heads_that_share_keys_sum_their_gradients(mask):
  tokens = arrays((2, 2, 70, 64), (2, 1, 130, 64), (2, 1, 130, 64))
  options = {"score": transformer_xl(heads=(2,)), "mask": mask}
  check(tokens, **options)


@pytest.mark.exhaustive
def test_a_traced_shift():
  """To positions whose angles are large."""
  tokens = arrays((70, 64), (130, 64), (130, 64))

  def with_shift(implementation, shift):
    score = transformer_xl().shifted(shift)
    return outputs(implementation, tokens, score=score)

  with_shift = jax.jit(with_shift, static_argnums=0)
  got, want = (with_shift(each, 9000) for each in (INTERPRETED, "reference"))
  jax.tree.map(close, got, want)


@ignore_nan
@sampled("number", ["nan", "inf"], default=["nan"])
@sampled("token", ["query", "key", "value"], default=[])
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(
  token, number
):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  options = {"score": transformer_xl(), "mask": masks.causal(40)}
  assert 0 < rows_of_nan(tokens, token, number, **options) < 70


@pytest.mark.exhaustive
@ignore_nan
def test_numbers_of_hidden_tokens_change_nothing():
  check_hidden_tokens((70, 100, 100), (66, 66), score=transformer_xl())


@pytest.mark.parametrize(
  ("reason", "dtype", "score"),
  [
    ("of sinusoids, got 64 and 32", jnp.bfloat16, transformer_xl(64, 32)),
    ("got float32 and float16", jnp.float16, transformer_xl()),
  ],
)
def test_what_the_kernels_do_not_support_is_an_error(reason, dtype, score):
  tokens = jnp.ones((8, 64), dtype)
  with pytest.raises(NotImplementedError, match=reason):
    attend(*[tokens] * 3, score=score, implementation=INTERPRETED)
