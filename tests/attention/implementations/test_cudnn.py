"""The cuDNN implementation, with the kernel replaced by XLA's attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, scores
from attention.implementations.cudnn import kernel as cudnn
from attention.modules import MultiHeadAttention
from tests.attention.implementations.cudnn_stand_in import SHAPES, agree, tokens
from tests.attention.oracle import draw
from tests.matrix import sampled

pytestmark = pytest.mark.usefixtures("_stand_in")

SCORES = {
  "scaled_dot": scores.scaled_dot(),
  "dot": scores.dot(),
  "cosine": scores.cosine(5.0),
}


@sampled("mask", [None, masks.causal()], default=[None])
@sampled("name", SCORES, default=["scaled_dot"])
def test_cudnn_equals_the_reference_for_dot_products(name, mask):
  shapes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)
  agree(*tokens(*shapes), score=SCORES[name], mask=mask)


@pytest.mark.parametrize("heads", [(), (3,)], ids=["one", "each"])
def test_general_score_may_change_the_number_of_features(heads):
  shapes = (2, 3, 5, 16), (2, 3, 7, 8), (2, 3, 7, 8), (*heads, 16, 8)
  *arrays, weight = tokens(*shapes)
  agree(*arrays, score=scores.general(weight / 8))


@pytest.mark.parametrize("features", [(8, 24), (24, 8)])
def test_zeros_make_numbers_of_features_equal_where_jax_needs_it(
  features, monkeypatch
):
  kernel = cudnn.call

  def of_equal_features(query, key, value, **options):
    if query.shape[-1] != value.shape[-1]:
      raise NotImplementedError("mla requires hopper")
    return kernel(query, key, value, **options)

  monkeypatch.setattr(cudnn, "call", of_equal_features)
  of_keys, of_values = features
  arrays = tokens((3, 6, of_keys), (3, 8, of_keys), (3, 8, of_values))
  agree(*arrays, mask=masks.causal())
  got, want = (
    jax.jit(
      jax.grad(
        lambda *arrays, name=name: jnp.sin(
          attend(*arrays, implementation=name).astype("f4")
        ).sum(),
        (0, 1, 2),
      )
    )(*arrays)
    for name in ("cudnn", "reference")
  )
  for one, other in zip(got, want):
    one, other = one.astype("f4"), other.astype("f4")
    np.testing.assert_allclose(one, other, 0.02, 0.03)


@pytest.mark.exhaustive
def test_limits_apply_to_mapped_tokens():
  arrays = tokens((5, 8), (7, 16), (7, 16))
  wide = jnp.ones((8, 16), jnp.float32)
  with pytest.raises(NotImplementedError, match="bfloat16, float32"):
    attend(*arrays, score=scores.general(wide), implementation="cudnn")
  # Three query heads, one key head.
  *arrays, heads = tokens((5, 8), (7, 16), (7, 16), (3, 8, 16))
  agree(*arrays, score=scores.general(heads / 8))


@sampled(
  ("leading", "memory"),
  [((), ()), ((3,), (3,)), ((2, 2, 3), (2, 2, 1)), ((2, 1, 2), (2, 1, 2))],
  default=[((2, 1, 2), (2, 1, 2))],
)
def test_supported_leading_axes_and_groups(leading, memory):
  shapes = (*leading, 5, 8), (*memory, 7, 8), (*memory, 7, 8)
  agree(*tokens(*shapes))


@pytest.mark.exhaustive
def test_nan_behind_a_causal_mask_changes_nothing():
  query, key, value = tokens((2, 6, 8), (2, 6, 8), (2, 6, 8))
  clean = attend(query, key, value, mask=masks.causal(), implementation="cudnn")
  dirty = attend(
    query,
    key.at[:, 4].set(jnp.nan),
    value.at[:, 4].set(jnp.inf),
    mask=masks.causal(),
    implementation="cudnn",
  )
  np.testing.assert_array_equal(dirty[:, :4], clean[:, :4])
  assert jnp.isnan(dirty[:, 4:]).all()


def test_dispatch_chooses_cudnn_for_supported_requests(monkeypatch):
  calls = []
  kernel = cudnn.call
  monkeypatch.setattr(
    cudnn, "call", lambda *a, **k: calls.append(1) or kernel(*a, **k)
  )
  shapes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)
  attend(*tokens(*shapes))
  count = len(calls)
  assert count
  attend(*tokens(*shapes, dtype=jnp.float32))
  assert len(calls) == count


@pytest.mark.parametrize(
  ("message", "change"),
  [
    ("float32", {"dtype": jnp.float32}),
    ("score", {"score": lambda query, key: query @ key.mT}),
    ("even numbers", {"mask": ~masks.causal()}),
    ("arrays as a bias", {"bias": biases.alibi(3)}),
    ("dtype of the query", {"bias": jnp.zeros((5, 7))}),
    ("dropout", {"dropout_rate": 0.5, "rng": jax.random.key(0)}),
    ("multiples of 8", {"size": 6}),
    ("refused by JAX", {"size": 136}),
  ],
)
def test_unsupported_requests_raise_with_a_reason(message, change):
  change = dict(change)
  size, dtype = change.pop("size", 8), change.pop("dtype", jnp.bfloat16)
  shapes = (2, 3, 5, size), (2, 3, 7, size), (2, 3, 7, size)
  with pytest.raises(NotImplementedError, match=message):
    attend(*tokens(*shapes, dtype=dtype), implementation="cudnn", **change)


def test_a_bias_in_the_dtype_of_the_query_may_hide_keys():
  bias = jnp.asarray(draw(7, (3, 6, 8))[0], jnp.bfloat16)
  agree(*tokens(*SHAPES), bias=bias.at[:, :, 2].set(-jnp.inf))


def test_forward_mode_through_multi_head_attention():
  module = MultiHeadAttention(4, dtype=jnp.bfloat16)
  mask = masks.causal() & masks.padding(jnp.array([3, 6]))

  def derivative(inputs):
    def output(inputs):
      return module.init_with_output(jax.random.key(0), inputs, mask=mask)[0]

    return jax.jvp(output, (inputs,), (inputs,))

  inputs = jax.ShapeDtypeStruct((2, 6, 32), jnp.bfloat16)
  result, tangent = jax.eval_shape(derivative, inputs)
  assert tangent.shape == result.shape == (2, 6, 32)


@sampled("memory_heads", [4, 2], default=[2])
def test_multi_head_attention_reaches_the_kernel(memory_heads, monkeypatch):
  calls = []
  kernel = cudnn.call
  monkeypatch.setattr(
    cudnn, "call", lambda *a, **k: calls.append(1) or kernel(*a, **k)
  )
  module = MultiHeadAttention(
    4, num_key_value_heads=memory_heads, dtype=jnp.bfloat16
  )
  inputs = jnp.ones((2, 6, 32), jnp.bfloat16)
  mask = masks.causal() & masks.padding(jnp.array([3, 6]))
  initialize = functools.partial(module.init_with_output, mask=mask)
  jax.eval_shape(initialize, jax.random.key(0), inputs)
  assert calls
