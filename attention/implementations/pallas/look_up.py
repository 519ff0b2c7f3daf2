"""Values per relative distance, an operation of traced functions."""

from typing import Any

import jax
from jax.extend.core import Primitive

# Kernels replace it by a function of theirs, so it is traced but never lowered.
by_distance_p = Primitive("by_distance")


def by_distance(
  length: int, first: Any, numbers: jax.Array, *, is_descending: bool = False
) -> jax.Array:
  """numbers[i, clip(first + t - 1 - i + j)], from [..., t, n], [..., t, s].

  Args:
    length: s.
    first: the place of the last row and the first column, int32 [].
    numbers: those of each row, by distance.
    is_descending: count places from the end.
  """
  return by_distance_p.bind(
    numbers, first, length=length, is_descending=is_descending
  )


@by_distance_p.def_abstract_eval
def _(numbers, first, *, length, is_descending):
  del first, is_descending
  return numbers.update(shape=(*numbers.shape[:-1], length))
