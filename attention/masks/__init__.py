"""Masks: who may look at whom. True means attend.

A mask is a pytree that knows its values block by block, so a causal mask
costs nothing until it is applied. Masks combine with `&`, `|` and `~`, with
boolean arrays too. Parameters that are Python integers are known when
tracing; arrays may be traced.

Parameters that belong to a batch (`key_lengths` [B], segment numbers [B, T])
line up with the leftmost leading axes of the scores: [B] of [B, H, T, S]. An
array used as a mask broadcasts as NumPy's arrays do, from the right.

`mask.materialize(T, S)` is the mask as a [..., T, S] array, and
`mask.shifted(offset)` the mask for queries that start at position `offset`.
"""

from attention.masks.constructors import (
  causal,
  padding,
  prefix,
  segments,
  sliding_window,
)
from attention.masks.types import Mask, as_mask

__all__ = [
  "Mask",
  "as_mask",
  "causal",
  "padding",
  "prefix",
  "segments",
  "sliding_window",
]
