"""Biases: numbers that depend on positions and are added to the scores.

A bias is a pytree that is evaluated block by block, as a mask is, and is
differentiable with respect to its arrays. `+` and `-` combine biases and
arrays, and `*` and `/` scale a bias by a number or by one number per head, [H].
A bias of -inf hides a key as a mask does, whatever its factor. A bias with one
entry per head, [H], applies to the last leading axis of the scores,
[B, H, T, S]; arrays broadcast by NumPy's rules.

`bias.materialize(T, S)` is the bias as a [..., T, S] array, and
`bias.shifted(offset)` the bias for queries that start at position `offset`.
"""

from attention.biases.constructors import alibi, relative_position
from attention.biases.types import Bias, as_bias

__all__ = ["Bias", "alibi", "as_bias", "relative_position"]
