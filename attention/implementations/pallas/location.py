"""Luong's location-based score as a dot product.

It is the product of a query with the vector of the key's position, so these
vectors are tokens of the kernels in place of the keys.
"""

import dataclasses

import jax

from attention.arrays import axes
from attention.implementations.blockwise.tiles import with_length
from attention.implementations.pallas.wrapped import base, with_base, wrappers
from attention.masks.types import Below
from attention.request import Request
from attention.scores.base import Wrapper
from attention.scores.classical import Dot
from attention.scores.luong_local import Location


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ProductWithVectors(Dot):
  """A dot product whose keys are vectors of positions.

  Kernels that multiply tokens of 16 bits round them, and not their gradients.
  """

  is_finite = True


def with_vectors_as_keys(request: Request) -> Request:
  """The request with a dot product for a location-based score."""
  location, length = base(request.score), request.scores_shape[-1]
  keep_keys = all(
    type(each).map_key is Wrapper.map_key for each in wrappers(request.score)
  )
  if not isinstance(location, Location) or not keep_keys:
    return request
  weight = location.weight
  mask, key = request.mask, request.key
  vectors = axes.with_rank(with_length(weight, length), key.ndim)
  if weight.shape[-2] < length:
    known = Below(weight.shape[-2])
    mask = known if mask is None else mask & known
  score = with_base(request.score, ProductWithVectors())
  return dataclasses.replace(request, score=score, key=vectors, mask=mask)
