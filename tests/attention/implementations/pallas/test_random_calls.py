"""Random calls of the kernels for TPUs, interpreted, and for Hopper GPUs."""

import jax
import jax.numpy as jnp
import pytest

from attention import attend
from tests.attention.implementations.pallas.random_calls import random_call
from tests.attention.implementations.pallas.test_hopper_code import (
  gradient_kernels,
)
from tests.attention.implementations.pallas.test_kernels import (
  INTERPRETED,
  close,
)
from tests.matrix import sampled


@sampled("seed", [*range(60)], default=[12])
def test_results_and_gradients_equal_the_reference(seed):
  call = random_call(seed, 8, 4)
  is_float = [each.dtype == "f4" for each in call.arrays]

  def results(implementation):
    def context(tokens, arrays):
      options = call.options(arrays)
      return attend(
        *tokens, **options, rng=jax.random.key(0), implementation=implementation
      )

    def loss(tokens, arrays):
      result = context(tokens, arrays)
      return jnp.sum(jnp.sin(result)), result

    run = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)
    arguments = jax.tree.map(jnp.asarray, (call.tokens, call.arrays))
    (of_tokens, of_arrays), result = jax.jit(run)(*arguments)
    kept = [x for x, own in zip(of_arrays, is_float) if own]
    return result, of_tokens, kept

  try:
    close(results(INTERPRETED), results("reference"), 1e-3)
  except AssertionError as error:
    raise AssertionError(call.label) from error


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("features", [(64, 128), (80, 48)])
def test_gradients_compile_for_a_gpu(seed, features):
  call = random_call(seed, *features)
  if features[0] % 64 and call.label.startswith("transformer_xl"):
    pytest.skip("Transformer-XL's score needs 64 or 128 features")
  floats = [x for x in call.arrays if x.dtype == "f4"]
  others = [x for x in call.arrays if x.dtype != "f4"]

  def options(floats, *others):
    floats, others = iter(floats), iter(others)
    arrays = [next(floats if x.dtype == "f4" else others) for x in call.arrays]
    return call.options(arrays) | {"rng": jax.random.key(0)}

  launched = gradient_kernels(
    options,
    [(x.shape, jnp.float32) for x in floats],
    [(x.shape, x.dtype) for x in others],
    [x.shape for x in call.tokens],
  )
  assert 1 <= launched <= 6, call.label
