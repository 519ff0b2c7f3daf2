"""Attention tile by tile: any score, in memory that grows as T + S."""

from attention.implementations.blockwise.implementation import Blockwise

__all__ = ["Blockwise"]
