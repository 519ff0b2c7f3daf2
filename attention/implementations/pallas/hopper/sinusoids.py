"""Transformer-XL's score as a dot product, for Hopper kernels.

Its factors are the contents of tokens, with rotated queries and sinusoids as
more features. They are rounded to the tokens' dtype, as mapped tokens are: for
standard normal tokens of 64 features, T = 4,096, scores have an error of 0.18%
of their root mean square, and of 0.13% if contents alone are rounded.
"""

import dataclasses

import jax.numpy as jnp

from attention.implementations.pallas.hopper.token_maps import changes_tokens
from attention.implementations.pallas.hopper.wrapped import (
  base,
  with_base,
  wrappers,
)
from attention.request import Request
from attention.scores import scaled_dot
from attention.scores.base import Placed
from attention.scores.sinusoidal import TransformerXL
from attention.scores.tile_positions import all_positions


def with_sinusoids_as_features(request: Request) -> Request:
  """The request with a dot product for Transformer-XL's score."""
  score, query, key = base(request.score), request.query, request.key
  is_moved = any(
    isinstance(each, Placed) or changes_tokens(each)
    for each in wrappers(request.score)
  )
  if type(score) is not TransformerXL or is_moved:
    return request
  places = all_positions(query, key)
  is_finite = jnp.isfinite(query)
  if request.is_masked:
    query = jnp.where(is_finite, query, jnp.zeros_like(query))
  left, right = score.factors(score.map_query(query), key, places)
  if request.is_masked:
    is_known = jnp.all(is_finite, axis=-1, keepdims=True)
    left = jnp.where(is_known, left, jnp.full_like(left, jnp.nan))
  scale = key.shape[-1] ** -0.5 if score.scale is None else score.scale
  return dataclasses.replace(
    request,
    query=left.astype(query.dtype),
    key=right.astype(key.dtype),
    score=with_base(request.score, scaled_dot(scale)),
  )
