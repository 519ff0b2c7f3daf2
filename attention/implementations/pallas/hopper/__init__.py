"""Kernels for Hopper GPUs: dot products, and sums over features of tokens.

A warpgroup holds 64 queries, or 64 keys for their gradients; scores and sums
stay in its registers. Products use the tensor cores. Other scores are added
channel by channel; in an additive score two channels share a reciprocal.
"""

from attention.implementations.pallas.hopper.from_request import make_problem
from attention.implementations.pallas.hopper.plan import plan
from attention.implementations.pallas.hopper.problem import Problem

__all__ = ["Problem", "make_problem", "plan"]
