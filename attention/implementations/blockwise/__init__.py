"""Attention tile by tile: any score, in memory that grows as T + S.

`softmax` visits the tiles and `rule` differentiates that; `tiling` cuts the
scores into tiles, of the `sizes` that suit the machine; `problem` turns a score
into a function of a tile, `pairs` does so for masks, biases and dropout.
"""

from attention.implementations.blockwise.implementation import Blockwise

__all__ = ["Blockwise"]
