"""Kernels for TPUs.

The grid has the leading axes of the context, one entry each, and then the
visits of tiles. A kernel holds a tile of queries or of keys, its sums stay in
VMEM from its first visit to its last, and Pallas loads the other tiles.
"""

from attention.implementations.pallas.tpu.from_request import make_problem
from attention.implementations.pallas.tpu.problem import Problem

__all__ = ["Problem", "make_problem"]
