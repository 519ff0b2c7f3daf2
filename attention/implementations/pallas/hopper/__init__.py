"""Kernels for Hopper GPUs: dot products, and sums over features of tokens.

A warpgroup holds 64 queries, or 64 keys for their gradients; scores and sums
stay in its registers. Products use the tensor cores. Other scores are added
channel by channel; those of an additive score cost a hyperbolic tangent
(`tanh.approx`, with a relative error of 2^-11), an addition and a multiply-add
for each pair.
"""

from attention.implementations.pallas.hopper.from_request import (
  make_problem,
  with_maps_inside,
)
from attention.implementations.pallas.hopper.problem import Problem

__all__ = ["Problem", "make_problem", "with_maps_inside"]
