"""An affine map, as the values that a module owns and a function applies."""

from typing import NamedTuple

import jax
from flax import linen as nn
from jax.typing import DTypeLike


class Affine(NamedTuple):
  """inputs @ W + b.

  Attributes:
    kernel: W [X, Y].
    bias: b [Y], or None.

  Example:
    >>> import jax.numpy as jnp
    >>> Affine(jnp.ones((3, 4)), jnp.ones(4))(jnp.ones((2, 3))).shape
    (2, 4)
  """

  kernel: jax.Array
  bias: jax.Array | None

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Maps [..., X] to [..., Y]."""
    product = inputs @ self.kernel
    if self.bias is None:
      return product
    return product + self.bias.reshape((1,) * (product.ndim - 1) + (-1,))


class AffineWeights(nn.Module):
  """Owns the weights of an affine map.

  Attributes:
    input_size: X.
    output_size: Y.
    dtype: of the computation; parameters are float32.

  Example:
    >>> layer = AffineWeights(input_size=3, output_size=4, dtype="float32")
    >>> affine, _ = jax.eval_shape(layer.init_with_output, jax.random.key(0))
    >>> affine.kernel.shape, affine.bias.shape
    ((3, 4), (4,))
  """

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
