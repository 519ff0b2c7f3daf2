"""Normalizers other than softmax in the kernels for Hopper GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks, normalizers, scores
from tests.attention.implementations.pallas.test_hopper import (
  INTERPRETED,
  arrays,
  close,
  ignore_nan,
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
}


def results(implementation, tokens, **options):
  """The gradients of tokens, also of rows of NaN, and the context."""

  def of_tokens(*tokens):
    return attend(*tokens, implementation=implementation, **options)

  def both(*tokens):
    context, pull_back = jax.vjp(of_tokens, *tokens)
    (cotangent,) = arrays(context.shape, seed=9, dtype=context.dtype)
    return pull_back(cotangent), context

  return jax.jit(both)(*tokens)


def check(tokens, **options):
  got = results(INTERPRETED, tokens, **options)
  tokens = [each.astype(jnp.float32) for each in tokens]
  want = results("reference", tokens, **options)
  jax.tree.map(close, got, want)
  return want


@sampled("mask", [None, masks.causal(40)], default=[None])
@sampled("name", [*NORMALIZERS], default=["softpick", "sigmoid of heads"])
def test_results_and_gradients_equal_the_reference(name, mask):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  score = scores.soft_cap(scores.scaled_dot(), 5.0)
  check(tokens, normalizer=NORMALIZERS[name], mask=mask, score=score)


@ignore_nan
@sampled("token", ["query", "key", "value"], default=["key"])
@sampled("name", [*NORMALIZERS], default=["signed softmax", "own"])
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(name, token):
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  place = ["query", "key", "value"].index(token)
  tokens[place] = tokens[place].at[0, 66, 3].set(jnp.nan)
  want = check(tokens, normalizer=NORMALIZERS[name], mask=masks.causal(40))
  num_nan = np.isnan(np.asarray(want[1])).any(axis=-1).sum()
  assert 0 < num_nan < 140


def test_operations_that_kernels_do_not_have_are_refused():
  tokens = jnp.ones((8, 64), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match="the operation erf_inv"):
    attend(*[tokens] * 3, normalizer=Inverse(), implementation=INTERPRETED)
