"""Affine maps: a module owns the weights, a function applies them."""

from typing import NamedTuple

import jax
from flax import linen as nn
from jax.typing import DTypeLike


class Affine(NamedTuple):
  """inputs @ W + b, with kernel W [X, Y] and bias b [Y] or None."""

  kernel: jax.Array
  bias: jax.Array | None

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Maps [..., X] to [..., Y]."""
    product = inputs @ self.kernel
    if self.bias is None:
      return product
    return product + self.bias.reshape((1,) * (product.ndim - 1) + (-1,))


class AffineWeights(nn.Module):
  """Owns the weights of an affine map from X to Y features."""

  input_size: int
  output_size: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self) -> Affine:
    """Returns the map in the dtype of the computation."""
    shape = (self.input_size, self.output_size)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
    bias = self.param("bias", nn.initializers.zeros, shape[1:])
    return Affine(kernel.astype(self.dtype), bias.astype(self.dtype))
