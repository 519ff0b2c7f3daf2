"""What the forward kernels compute."""

from typing import NamedTuple

import jax

from attention.arrays.softmax import Statistics


class Results(NamedTuple):
  """What a forward kernel computes."""

  context: jax.Array
  statistics: Statistics
  # Of `Sparse`, for gradients: means of values by the derivatives of weights.
  # Of softmax this is the context.
  means: jax.Array | None = None
