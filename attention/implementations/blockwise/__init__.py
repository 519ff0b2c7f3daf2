"""Attention tile by tile: any score, in memory that grows as T + S.

`online_softmax` visits the tiles and `derivative` differentiates that; `tiles`
cuts the scores into tiles, of the `tile_sizes` that suit the machine; `problem`
makes functions of a tile from a score, a mask, a bias and dropout.
"""

from attention.implementations.blockwise.implementation import Blockwise

__all__ = ["Blockwise"]
