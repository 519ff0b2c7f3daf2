"""Attention by kernels written in Pallas."""

from attention.implementations.pallas.implementation import Pallas

__all__ = ["Pallas"]
