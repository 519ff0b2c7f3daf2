"""What the kernels for Hopper GPUs compute of tokens, and what XLA does."""

import dataclasses
from typing import NamedTuple

from attention.implementations.dot_products import is_dot_product
from attention.implementations.pallas.hopper import local
from attention.implementations.pallas.hopper.scores import projections
from attention.implementations.pallas.hopper.terms import (
  by_sinusoids,
  token_maps,
)
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  Prediction,
)
from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.terms.token_maps import (
  changes_tokens,
)
from attention.implementations.pallas.hopper.tiles.layout import SIDE
from attention.implementations.pallas.location import with_vectors_as_keys
from attention.implementations.pallas.maps import MapsInside
from attention.implementations.pallas.wrapped import base, wrappers
from attention.request import Request
from attention.scores import Score
from attention.scores.classical import Dot, ScaledDot
from attention.scores.relative import Disentangled, Shaw


class InKernelMaps(NamedTuple):
  """What kernels compute of tokens."""

  score: Score  # with predicted shares in place of a prediction
  term: ScoreTerm | None = None
  prediction: Prediction | None = None


def plan(request: Request) -> tuple[Request, InKernelMaps]:
  """The request of the tokens that kernels read, and what these compute.

  XLA maps the tokens of a request whose score is not `MapsInside`.
  """
  prediction = local.of_request(request)
  if prediction is not None:
    known = dataclasses.replace(request, score=prediction.score)
    inside = _in_kernel(known)
    if _reads_unmapped(known, inside):
      return _unmapped(request), inside._replace(prediction=prediction)
  request = with_vectors_as_keys(local.with_shares(request))
  inside = _in_kernel(request)
  return (_unmapped(request) if inside.term else request), inside


def _unmapped(request: Request) -> Request:
  return dataclasses.replace(request, score=MapsInside(request.score))


def _in_kernel(request: Request) -> InKernelMaps:
  """What kernels compute of tokens besides a prediction."""
  inside, score = InKernelMaps(request.score), base(request.score)
  if is_dot_product(score):
    return inside._replace(term=token_maps.inside(request))
  if any(map(changes_tokens, wrappers(request.score))):
    return inside
  term = projections.of_request(request) or by_sinusoids.of_request(request)
  return inside._replace(term=term)


def _reads_unmapped(request: Request, inside: InKernelMaps) -> bool:
  """Whether kernels read tokens from which they can predict."""
  score = base(request.score)
  has_maps = any(map(changes_tokens, wrappers(request.score)))
  if type(score) in (Shaw, Disentangled):
    # With more features a block has no memory for both.
    return request.query.shape[-1] <= SIDE and not has_maps
  if not is_dot_product(score):
    return inside.term is not None and inside.term.is_projection
  has_maps = has_maps or type(score) not in (Dot, ScaledDot)
  return not has_maps or inside.term is not None
