"""The weights of a projection between groups of axes."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike


class ProjectionWeights(nn.Module):
  """The kernel and the bias of a projection between groups of axes."""

  use_bias: bool
  kernel_init: Callable
  bias_init: Callable
  param_dtype: DTypeLike

  @nn.compact
  def __call__(self, inputs: tuple[int, ...], outputs: tuple[int, ...]):
    """A kernel [*inputs, *outputs], and a bias [*outputs] or None."""

    # Fan-in is the product of all inputs, fan-out that of all outputs.
    def initialize(rng, shape, dtype):
      matrix = (math.prod(inputs), math.prod(outputs))
      return jnp.reshape(self.kernel_init(rng, matrix, dtype), shape)

    shape = (*inputs, *outputs)
    kernel = self.param("kernel", initialize, shape, self.param_dtype)
    if not self.use_bias:
      return kernel, None
    return kernel, self.param("bias", self.bias_init, outputs, self.param_dtype)
