"""Normalizers other than softmax in the kernels for Hopper GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attention import attend, masks, normalizers, scores
from tests.attention.implementations.pallas.hopper import (
  INTERPRETED,
  arrays,
  check,
  ignore_nan,
  pulled_back,
  rows_of_nan,
)
from tests.matrix import sampled


class PositivePart(normalizers.Normalizer):
  """An elementwise normalizer whose comparison loses NaN."""

  is_elementwise = True
  ignores_hidden = True

  def __call__(self, scores):
    return jnp.where(scores > 0.0, 0.1 * scores, 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Inverse(normalizers.OnlineNormalizer):
  """A normalizer with an operation that kernels do not have."""

  def terms(self, scores, maximum):
    parts = jax.lax.erf_inv(jnp.exp(scores - maximum))
    return parts, parts


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
@sampled("name", [*NORMALIZERS], default=["entmax", "sigmoid of heads"])
def test_results_and_gradients_equal_the_reference(name, mask):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  score = scores.soft_cap(scores.scaled_dot(), 5.0)
  options = {"normalizer": NORMALIZERS[name], "mask": mask, "score": score}
  check(tokens, pulled_back, **options)


@ignore_nan
@sampled("token", ["query", "key", "value"], default=["key"])
@sampled("name", [*NORMALIZERS], default=["own"])
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(name, token):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  options = {"normalizer": NORMALIZERS[name], "mask": masks.causal(40)}
  assert 0 < rows_of_nan(tokens, token, results=pulled_back, **options) < 70


def test_operations_that_kernels_do_not_have_are_refused():
  tokens = jnp.ones((8, 64), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match="the operation erf_inv"):
    attend(*[tokens] * 3, normalizer=Inverse(), implementation=INTERPRETED)
