"""`merge`: contexts over disjoint sets of keys."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks, merge
from tests.attention.comparison import close
from tests.attention.oracle import draw


def in_parts(query, key, value, cuts, mask):
  """Attends to the keys piece by piece."""
  contexts, lses = [], []
  for start, stop in itertools.pairwise(cuts):
    context, lse = attend(
      query,
      key[..., start:stop, :],
      value[..., start:stop, :],
      mask=mask[..., start:stop],
      return_lse=True,
    )
    contexts.append(context)
    lses.append(lse)
  return merge(contexts, lses)


@pytest.mark.exhaustive
def test_merged_parts_equal_attention_over_all_keys_with_derivatives():
  query, key, value = draw(0, (2, 4, 3), (2, 7, 3), (2, 7, 5))
  # One part has no keys, one is masked for some rows; row 0 has no visible key.
  mask = masks.causal(-1).materialize(4, 7)
  with jax.enable_x64(True):
    arguments = tuple(jnp.asarray(x) for x in (query, key, value))

    def whole(query, key, value):
      return attend(query, key, value, mask=mask, return_lse=True)

    def parts(query, key, value):
      return in_parts(query, key, value, (0, 0, 2, 3, 7), mask)

    def loss(function):
      def scalar(*arguments):
        context, lse = function(*arguments)
        return jnp.sum(jnp.sin(context)) + jnp.sum(
          jnp.where(jnp.isneginf(lse), 0.0, lse) ** 2
        )

      return scalar

    for got, want in zip(
      jax.jit(parts)(*arguments), whole(*arguments), strict=True
    ):
      np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    gradients = [
      jax.jit(jax.grad(loss(function), (0, 1, 2)))(*arguments)
      for function in (parts, whole)
    ]
    products = [
      jax.jit(
        lambda *point, function=function: jax.jvp(
          jax.grad(loss(function), (0, 1, 2)), point, arguments
        )[1]
      )(*arguments)
      for function in (parts, whole)
    ]
    for pair in (gradients, products):
      close(*pair, rtol=1e-9, atol=1e-11)


def test_merging_fully_masked_parts_gives_zero_and_minus_infinity():
  parts = [np.zeros((2, 3), "f4")] * 2, [np.full(2, -np.inf, "f4")] * 2
  context, lse = jax.jit(merge)(*parts)
  assert not np.any(context)
  assert np.isneginf(lse).all()


def test_merged_context_has_the_dtype_of_the_first_part():
  parts = [jnp.ones((2, 3), jnp.bfloat16)], [jnp.zeros(2)]
  context, lse = jax.eval_shape(merge, *parts)
  assert context.dtype == jnp.bfloat16
  assert lse.dtype == jnp.float32


def test_parts_may_be_one_array():
  contexts, lses = jnp.array([[[1.0]], [[3.0]]]), jnp.zeros((2, 1))
  context, lse = jax.jit(merge)(contexts, lses)
  np.testing.assert_allclose(context, [[2.0]])
  np.testing.assert_allclose(lse, [np.log(2.0)], rtol=1e-6)


def test_merge_rejects_missing_or_misshapen_parts():
  with pytest.raises(ValueError, match="contexts and lses"):
    merge([], [])
  with pytest.raises(ValueError, match="contexts and lses"):
    merge([jnp.ones((2, 3))], [])
  with pytest.raises(AssertionError, match=r"lses\[0\]"):
    merge([jnp.ones((2, 3))], [jnp.ones(3)])
  with pytest.raises(TypeError, match=r"contexts\[0\] must be an array"):
    merge([[1.0]], [[1.0]])
