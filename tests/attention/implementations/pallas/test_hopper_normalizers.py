"""Normalizers other than softmax in the kernels for Hopper GPUs."""

import jax
import jax.numpy as jnp
import pytest

from attention import attend, masks, normalizers, scores
from attention.implementations import Pallas
from tests.attention.implementations.pallas.hopper import (
  INTERPRETED,
  additive,
  arrays,
  check,
  general,
  ignore_nan,
  pulled_back,
  rows_of_nan,
  transformer_xl,
)
from tests.attention.implementations.pallas.test_kernels import Inverse
from tests.matrix import sampled


class PositivePart(normalizers.Normalizer):
  """An elementwise normalizer whose comparison loses NaN."""

  is_elementwise = True
  ignores_hidden = True

  def __call__(self, scores):
    return jnp.where(scores > 0.0, 0.1 * scores, 0.0)


NORMALIZERS = {
  "softpick": normalizers.softpick(),
  "signed softmax": normalizers.signed_softmax(),
  "sigmoid": normalizers.sigmoid(-2.0),
  "sigmoid of heads": normalizers.sigmoid(jnp.asarray([-1.0, -2.0])),
  "own": PositivePart(),
  "entmax": normalizers.entmax(),
  "sparsemax": normalizers.sparsemax(),
}


@sampled("mask", [None, masks.causal(40)], default=[None])
@sampled("name", [*NORMALIZERS], default=["sigmoid of heads", "signed softmax"])
def test_results_and_gradients_equal_the_reference(name, mask):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  score = scores.soft_cap(scores.scaled_dot(), 5.0)
  options = {"normalizer": NORMALIZERS[name], "mask": mask, "score": score}
  check(tokens, pulled_back, **options)


SCORES = {
  "disentangled": scores.disentangled(
    *(0.3 * each for each in arrays((20, 64), (20, 64), seed=5))
  ),
  "Shaw": scores.shaw(0.3 * arrays((21, 64), seed=5)[0]),
  "Transformer-XL": transformer_xl(),
  "projected": additive(64),
  "general": general(),
}


@sampled("name", [*SCORES], default=["Shaw"])
def test_rounds_of_entmax_compute_scores_again(name):
  """A block uses the memory of results until it writes them."""
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  options = {"normalizer": normalizers.entmax(), "mask": masks.causal(40)}
  check(tokens, pulled_back, score=SCORES[name], **options)


@ignore_nan
@sampled("token", ["query", "key", "value"], default=["key"])
@sampled("name", [*NORMALIZERS], default=["own"])
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(name, token):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  options = {"normalizer": NORMALIZERS[name], "mask": masks.causal(40)}
  assert 0 < rows_of_nan(tokens, token, results=pulled_back, **options) < 70


@pytest.mark.parametrize("kernels", [INTERPRETED, Pallas(interpret=True)])
@sampled("name", [*NORMALIZERS], default=["sigmoid", "entmax"])
def test_numbers_of_float64_do_not_enter_kernels(name, kernels):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  options = {"normalizer": NORMALIZERS[name], "mask": masks.causal(40)}
  with jax.enable_x64(True):
    found = jax.eval_shape(lambda: pulled_back(kernels, tokens, **options))
  assert all(each.dtype == jnp.bfloat16 for each in jax.tree.leaves(found))


def test_operations_that_kernels_do_not_have_are_refused():
  tokens = jnp.ones((8, 64), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match="the operation erf_inv"):
    attend(*[tokens] * 3, normalizer=Inverse(), implementation=INTERPRETED)
