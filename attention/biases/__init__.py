"""Biases: numbers added to the scores that depend on positions.

A bias is a pytree that knows its values block by block, as a mask does, and
is differentiable in what it holds. Biases add with `+`, arrays too, and -inf
hides a key as a mask does. A head axis lines up with the last leading axis of
the scores, [H] of [B, H, T, S]; arrays broadcast as NumPy's do.

`bias.materialize(T, S)` is the bias as a [..., T, S] array, and
`bias.shifted(offset)` the bias for queries that start at position `offset`.
"""

from attention.biases.constructors import (
  alibi,
  relative_position,
)
from attention.biases.types import Bias, as_bias

__all__ = ["Bias", "alibi", "as_bias", "relative_position"]
