"""What the axes of traced arrays belong to: queries, keys or features."""

from collections.abc import Sequence
from typing import Any

from attention.implementations.pallas.functions import OPERATIONS
from attention.implementations.pallas.operands import Unsupported

# What each axis of an array belongs to; None for an axis of size 1.
Owners = tuple[str | None, ...]
QUERY, KEY, FEATURE = "query", "key", "feature"
SHAPES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
_REDUCTIONS = frozenset(
  ["dot_general", "reduce_max", "reduce_min", "reduce_sum"]
)
_PARTS = frozenset(["concatenate", "iota", "slice", "split"])
_ELEMENTWISE = OPERATIONS - SHAPES - _REDUCTIONS - _PARTS


def axes_of(equation: Any, inputs: Sequence[Owners]) -> Owners:
  """What the axes of an operation's result belong to.

  Raises `Unsupported` for operations on other axes than a sum's.
  """
  name = equation.primitive.name
  if name in _ELEMENTWISE:
    return _of_elements(equation, inputs)
  if name == "dot_general":
    return _of_product(equation, inputs)
  if name not in SHAPES and name != "reduce_sum":
    raise Unsupported(
      f"does not support the operation {name} in a score that is no dot product"
    )
  (source,) = inputs
  if name == "transpose":
    return tuple(source[axis] for axis in equation.params["permutation"])
  if name == "reduce_sum":
    removed = equation.params["axes"]
    return tuple(
      owner for axis, owner in enumerate(source) if axis not in removed
    )
  if name == "broadcast_in_dim":
    return _of_broadcast(equation, source)
  return _of_reshape(equation, source)


def _of_elements(equation: Any, inputs: Sequence[Owners]) -> Owners:
  merged: list[str | None] = [None] * len(_shape(equation))
  for each in inputs:
    for number, owner in enumerate(each):
      if owner is not None and merged[number] not in (None, owner):
        raise Unsupported("supports no other pairs than queries and keys")
      merged[number] = owner or merged[number]
  return tuple(merged)


def _of_product(equation: Any, inputs: Sequence[Owners]) -> Owners:
  contracted, batch = equation.params["dimension_numbers"]
  places = [axes[0] for axes in contracted if len(axes) == 1]
  summed = [each[place] for each, place in zip(inputs, places)]
  if any(batch) or summed != [FEATURE] * 2:
    raise Unsupported("supports products of queries and keys only")
  return tuple(
    owner
    for place, each in zip(places, inputs)
    for axis, owner in enumerate(each)
    if axis != place
  )


def _of_broadcast(equation: Any, source: Owners) -> Owners:
  before, after = equation.invars[0].aval.shape, _shape(equation)
  merged: list[str | None] = [None] * len(after)
  for number, axis in enumerate(equation.params["broadcast_dimensions"]):
    if before[number] == after[axis]:
      merged[axis] = source[number]
  return tuple(merged)


def _of_reshape(equation: Any, source: Owners) -> Owners:
  """Those of a result that has other axes of size 1 only."""
  before, after = equation.invars[0].aval.shape, _shape(equation)
  if [n for n in before if n > 1] != [n for n in after if n > 1]:
    raise Unsupported("supports scores with one sum over the features")
  kept = iter([owner for owner, size in zip(source, before) if size > 1])
  return tuple(next(kept) if size > 1 else None for size in after)


def _shape(equation: Any) -> Sequence[int]:
  return equation.outvars[0].aval.shape
