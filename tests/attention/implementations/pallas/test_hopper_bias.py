"""Gradients of arrays of a bias, in the kernels for Hopper GPUs."""

import jax
import jax.numpy as jnp

from attention import attend, biases, masks, normalizers, scores
from attention.implementations.pallas.hopper.block import shared_tokens
from attention.multi_head.grouped_query import attend_heads
from tests.attention.comparison import equations
from tests.attention.implementations.pallas.hopper import (
  CASES,
  INTERPRETED,
  arrays,
  close,
  ignore_nan,
)
from tests.matrix import sampled

(TABLE,) = arrays((20, 70), seed=5, dtype=jnp.float32)


def check_gradients(loss, *arrays, is_by_kernels=True):
  """Compares loss(implementation, *arrays), which kernels may serve alone."""

  def gradients(implementation, *arrays):
    return jax.grad(loss, range(1, 1 + len(arrays)))(implementation, *arrays)

  jitted = jax.jit(gradients, static_argnums=0)
  traced = jitted.trace(INTERPRETED, *arrays)
  got = traced.lower().compile()(*arrays)
  assert [x.dtype for x in got] == [x.dtype for x in arrays]
  jax.tree.map(close, got, jitted("reference", *arrays))
  found = equations(traced.jaxpr.jaxpr, without=["mpmd_map"])
  names = [each.primitive.name for each in found]
  assert "mpmd_map" in names
  assert is_by_kernels == (not {"dot_general", "scan", "while"} & set(names))


@sampled(
  ("shape", "name"),
  [
    ((70, 130), "dot"),
    ((2, 70, 130), "soft cap"),
    ((2, 1, 70, 130), "projected"),
    ((2, 2, 70, 130), "dot"),
    ((2, 1, 130), "soft cap"),
    ((70, 1), "dot"),
    ((2, 1, 1, 130), "dot"),
    ((2, 1, 1), "dot"),
  ],
  default=[],  # sums of biases, below, have arrays
)
@sampled("dtype", [jnp.float32, jnp.bfloat16], default=[jnp.float32])
# With one block for both examples that share the array, or with two.
@sampled("at_once", [4, 132], default=[4])
@ignore_nan
def test_arrays(shape, name, dtype, at_once, monkeypatch):
  monkeypatch.setattr(shared_tokens, "AT_ONCE", at_once)
  tokens = arrays((2, 2, 70, 64), (2, 2, 130, 64), (2, 2, 130, 64))
  (bias,) = arrays(shape, seed=4, dtype=dtype)
  # Some tiles are hidden, some queries see no key, and a key is NaN.
  mask = masks.sliding_window(60, 20) & masks.padding(jnp.array([20, 130]))
  tokens[1] = tokens[1].at[1, 0, 60].set(jnp.nan)

  def loss(implementation, *arrays):
    *tokens, bias = arrays
    context = attend(
      *tokens,
      **CASES[name],
      mask=mask,
      bias=bias,
      # For softmax the sum of a row's gradients is 0.
      normalizer=normalizers.sigmoid(),
      implementation=implementation,
    ).astype(jnp.float32)
    return jnp.sum(jnp.where(jnp.isnan(context), 0.0, jnp.sin(context)))

  check_gradients(loss, *tokens, bias)


@sampled("name", ["array", "factors", "T5"], default=[])
def test_arrays_of_grouped_heads(name):
  tokens = arrays((1, 4, 20, 64), (1, 2, 70, 64), (1, 2, 70, 64))
  shape, bias = {
    "array": ((4, 20, 70), biases.as_bias),
    "factors": ((4,), lambda array: array * biases.as_bias(TABLE)),
    "T5": ((32, 4), biases.relative_position),
  }[name]
  (array,) = arrays(shape, seed=4, dtype=jnp.float32)

  def loss(implementation, *arrays):
    *tokens, array = arrays
    context, _ = attend_heads(
      *tokens,
      score=scores.scaled_dot(),
      mask=masks.causal(50),
      bias=bias(array),
      normalizer=normalizers.sigmoid(),
      implementation=implementation,
    )
    return jnp.sum(jnp.sin(context.astype(jnp.float32)))

  check_gradients(loss, *tokens, array)


@sampled(
  "name", ["T5 and arrays", "scaled", "shifted"], default=["T5 and arrays"]
)
def test_sums_of_biases(name, monkeypatch):
  monkeypatch.setattr(shared_tokens, "AT_ONCE", 4)
  tokens = arrays((2, 2, 20, 64), (2, 2, 70, 64), (2, 2, 70, 64))
  shapes = (32, 2), (2, 20, 70), (20, 70), (2,)
  table, of_heads, shared, factors = arrays(*shapes, seed=4)
  bias, parameters = {
    # Arrays of different axes have a kernel each.
    "T5 and arrays": (
      lambda table, *arrays: sum(arrays, biases.relative_position(table)),
      (table, of_heads, shared),
    ),
    "scaled": (
      lambda factors, array: factors * biases.as_bias(array),
      (factors, of_heads),
    ),
    "shifted": (
      lambda array: biases.as_bias(array) + biases.as_bias(array).shifted(3),
      (of_heads,),
    ),
  }[name]
  parameters = [each.astype(jnp.float32) for each in parameters]

  def loss(implementation, *arrays):
    context = attend(
      *arrays[:3], bias=bias(*arrays[3:]), implementation=implementation
    )
    return jnp.sum(jnp.sin(context.astype(jnp.float32)))

  check_gradients(loss, *tokens, *parameters, is_by_kernels=name != "shifted")
