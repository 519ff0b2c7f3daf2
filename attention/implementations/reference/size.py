"""Where the dense formula is the fastest."""

import math

from attention.arrays.meshes import num_automatic_devices
from attention.request import Request

# Up to this many elements the dense formula is as fast, measured on CPUs
# (`docs/measurements.md`), and compiles sooner.
_ON_CPUS = 1 << 18
# Accelerators start several operations for each tile, so that the dense formula
# is faster as long as its arrays of pairs are at most so large.
_BYTES = 256 << 20


def is_small(request: Request) -> bool:
  """Whether the dense formula is faster than tiles."""
  if not request.has_known_sizes:
    return False
  elements = math.prod(request.scores_shape) * request.elements_per_pair
  if request.target == "cpu":
    return elements <= _ON_CPUS
  # The scores, and on GPUs the weights in the dtype of the tokens.
  size = request.dtype.itemsize
  if request.target == "cuda":
    size += request.query.dtype.itemsize
  return elements // num_automatic_devices() * size <= _BYTES
