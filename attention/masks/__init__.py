"""Masks: which queries may attend to which keys. True means attend.

A mask is a pytree that is evaluated block by block, so a causal mask needs no
[T, S] array. Masks and boolean arrays combine with `&`, `|` and `~`. Parameters
that are Python integers are constants when tracing; arrays may be traced.

Parameters per example (`key_lengths` [B], segment ids [B, T]) align with the
leftmost leading axes of the scores, [B] with B of [B, H, T, S]. Arrays used as
masks broadcast by NumPy's rules, from the right.

`mask.materialize(T, S)` is the mask as a [..., T, S] array, and
`mask.shifted(offset)` the mask for queries that start at position `offset`.
"""

from attention.masks.constructors import (
  causal,
  padding,
  prefix,
  segments,
  sliding_window,
  where,
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
  "where",
]
