"""Kernels with numbers of 64 bits, and tokens without features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, scores
from attention.implementations import Pallas
from tests.attention.comparison import equations
from tests.attention.implementations.pallas import hopper
from tests.attention.oracle import draw

KERNELS = Pallas(interpret=True)


def gradients(implementation, tokens, bias, parameter):
  def loss(tokens, bias, parameter):
    context = attend(
      *tokens,
      score=scores.temperature(scores.dot(), parameter),
      bias=bias,
      implementation=implementation,
    )
    return jnp.sum(jnp.sin(context))

  return jax.jit(jax.grad(loss, (0, 1, 2)))(tokens, bias, parameter)


def test_arrays_of_64_bits_beside_tokens_of_32_receive_their_gradients():
  tokens = draw(0, (7, 8), (9, 8), (9, 8), dtype=jnp.float32)
  with jax.enable_x64(True):
    arguments = tokens, jnp.linspace(-1.0, 1.0, 9)[None], jnp.float64(2.0)
    got = gradients(KERNELS, *arguments)
    want = gradients("reference", *arguments)
  for own, other in zip(*map(jax.tree.leaves, (got, want))):
    assert own.dtype == other.dtype
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def test_kernels_for_tpus_have_no_numbers_of_64_bits():
  """Which Mosaic would not compile, also with `jax_enable_x64`."""
  lengths = masks.padding(jnp.asarray([200]))
  options = {"mask": lengths & masks.causal(), "bias": biases.alibi(2)}
  tokens = draw(0, *[(1, 2, 256, 64)] * 3, dtype=jnp.bfloat16)

  def loss(*tokens):
    kernels = Pallas(target="tpu")
    return jnp.sum(attend(*tokens, implementation=kernels, **options))

  with jax.enable_x64(True):
    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*tokens)
  kernels = [
    each.params
    for each in equations(program.jaxpr, without=["pallas_call"])
    if each.primitive.name == "pallas_call"
  ]
  assert len(kernels) == 3
  for each in kernels:
    blocks = each["grid_mapping"].block_mappings
    inner = each["jaxpr"], *(x.index_map_jaxpr.jaxpr for x in blocks)
    assert not any("64[" in str(jaxpr) for jaxpr in inner)


def test_dropout_of_one_leading_entry_under_x64():
  tokens = hopper.arrays((1, 64, 64), (1, 64, 64), (1, 64, 64))
  with jax.enable_x64(True):
    options = {"dropout_rate": 0.3, "rng": jax.random.key(0)}
    got, want = (
      attend(*tokens, implementation=each, **options)
      for each in (hopper.INTERPRETED, "reference")
    )
  hopper.close(got, want)


@pytest.mark.parametrize("kernels", [KERNELS, hopper.INTERPRETED])
def test_tokens_without_features_have_equal_weights(kernels):
  (value,) = draw(0, (64, 64), dtype=jnp.bfloat16)
  empty = value[:, :0]
  context = attend(empty, empty, value, implementation=kernels)
  hopper.close(context, jnp.broadcast_to(value.mean(0), context.shape))


def test_other_dtypes_beside_float64_are_refused():
  with jax.enable_x64(True):
    wide = jnp.ones((5, 4), jnp.float64)
    with pytest.raises(NotImplementedError, match="only if all arrays have"):
      attend(wide, wide.astype(jnp.float32), wide, implementation=KERNELS)
