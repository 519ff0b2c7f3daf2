"""The arguments of `attend`, validated and aligned."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention import serialization as serialization  # registers types
from attention.arrays import axes
from attention.arrays.head_parameters import check_parameters
from attention.arrays.matmul import precision_name
from attention.arrays.softmax import Statistics
from attention.biases.types import Bias, as_bias, with_numbers_by_distance
from attention.checks import check_leading, check_shape, check_tokens
from attention.dropout import Dropout
from attention.masks.types import Mask, as_mask
from attention.normalizers import (
  Normalizer,
  OnlineNormalizer,
  Quotient,
  as_normalizer,
  check_row_wise,
  is_online,
  is_softmax,
)
from attention.positional.base import Pairwise
from attention.scores import Positions, Score, as_score
from attention.scores.decay import with_running_sums
from attention.scores.tracing import trace_score

Combined = tuple[jax.Array, Statistics]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """The arguments of `attend`, validated and aligned, for an implementation.

  Attributes:
    query: [..., T, Dq]; query, key and value have the same rank.
    key: [..., S, Dk].
    value: [..., S, E].
    score: the score.
    mask: a mask or None.
    bias: a bias or None.
    dropout: the dropout of the weights, or None. It does not change the lse.
    normalizer: the function from scores to weights.
    scores_shape: [..., T, S], the shape of the scores.
    elements_per_pair: the elements of the largest intermediate array of the
      score, per query and key: 1 for a dot product, D for query - key.
    return_lse: whether the caller needs the lse.
    precision: the name of the precision of matrix products, for
      `jax.default_matmul_precision`; None is the platform's default. Products
      that an implementation traces when it is called have it anyway.
    combined: None, or the context and the statistics over all key shards if
      `key` is one of them. The implementation then returns these two values,
      with this shard's terms of the derivatives, which are sums over keys.
    branch: the platform of the branch of the program that computes this, by the
      name of `jax.lax.platform_dependent`; None outside of such a branch.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  score: Score
  mask: Mask | None
  bias: Bias | None
  dropout: Dropout | None
  normalizer: Normalizer
  scores_shape: tuple[int, ...]
  elements_per_pair: int = 1
  return_lse: bool = True
  precision: str | None = None
  branch: str | None = None
  combined: Combined | None = None

  @property
  def tokens(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The query, the key and the value."""
    return self.query, self.key, self.value

  @property
  def leading(self) -> tuple[int, ...]:
    """The leading axes of the context: those of the scores and the value."""
    return jnp.broadcast_shapes(self.scores_shape[:-2], self.value.shape[:-2])

  @property
  def dtype(self) -> Any:
    """The dtype of the softmax and its statistics, float32 at least."""
    return jnp.promote_types(jnp.result_type(*self.tokens), jnp.float32)

  @property
  def is_masked(self) -> bool:
    """Whether a mask or a bias can hide keys."""
    return self.mask is not None or self.bias_may_hide

  @property
  def bias_may_hide(self) -> bool:
    """Whether a number of the bias may be -inf."""
    return self.bias is not None and self.bias.may_hide

  @property
  def prepared(self) -> "Request":
    """The request with what is computed once and not for each tile."""
    return dataclasses.replace(
      self,
      score=with_running_sums(self.score),
      bias=with_numbers_by_distance(self.bias),
    )

  @property
  def online_normalizer(self) -> OnlineNormalizer | None:
    """The normalizer of what `pair_at` returns, if it needs no whole rows."""
    if self.score.denominator is not None:
      return Quotient()
    return self.normalizer if is_online(self.normalizer) else None

  def pair_at(
    self, query: jax.Array, key: jax.Array, positions: Positions
  ) -> Any:
    """The scores of mapped tokens, or those of numerators and denominators."""
    scores = self.score.pair_at(query, key, positions)
    if self.score.denominator is None:
      return scores
    return scores, self.score.denominator.pair_at(query, key, positions)

  @property
  def is_empty(self) -> bool:
    """Whether there is no score, or no row of the context."""
    return 0 in (*self.leading, *self.scores_shape[-2:])

  @property
  def has_known_sizes(self) -> bool:
    """Whether no size is a symbol of `jax.export`."""
    return all(isinstance(size, int) for size in self.scores_shape)

  @functools.cached_property
  def platform(self) -> str | None:
    """The arrays' platform; None under `jax.jit`, which chooses it later."""
    platforms = [_platform(array) for array in self.tokens]
    return None if None in platforms else platforms[0]

  @property
  def target(self) -> str:
    """The platform to compute on, by the name of `platform_dependent`."""
    platform = self.branch or self.platform or jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _platform(array: Any) -> str | None:
  while isinstance(array, jax.core.Tracer):
    # `jax.grad` and `jax.vmap` wrap arrays that may be concrete.
    array = getattr(array, "primal", getattr(array, "val", None))
  if not isinstance(array, jax.Array):
    return None
  return next(iter(array.devices())).platform


def make_request(
  query: Any,
  key: Any,
  value: Any,
  *,
  score: Score | Callable,
  mask: Any = None,
  bias: Any = None,
  dropout: Dropout | None = None,
  normalizer: Normalizer | Callable | None = None,
  return_lse: bool = True,
  combined: Combined | None = None,
) -> Request:
  """Validates the arguments of `attend` and gives all tokens one rank."""
  check_tokens(query=query, key=key, value=value)
  query, key, value = (jnp.asarray(array) for array in (query, key, value))
  length = key.shape[-2]
  check_shape("value", value, length=length, features=None, fits="key")
  check_leading(query=query, key=key, value=value)
  score = as_score(score)
  query, key, value = axes.aligned(query, key, value)
  leading = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2])
  check_parameters(score, leading, may_grow=True)
  scores, elements_per_pair = _traced(score, query, key)
  rank = len(scores)
  if rank > query.ndim:
    # Arrays of the score have more leading axes than the tokens.
    query, key, value = (axes.with_rank(x, rank) for x in (query, key, value))
    scores, elements_per_pair = _traced(score, query, key)
    if len(scores) > rank:
      raise ValueError(
        f"score may not add leading axes to those of its arguments: for query "
        f"{query.shape} and key {key.shape} it returned {scores}; let its"
        " arrays broadcast, [H, 1, 1] or einsum('hde,...htd->...hte')"
      )
  leading = jnp.broadcast_shapes(scores[:-2], value.shape[:-2])
  shape = (*leading, *scores[-2:])
  request = Request(
    query,
    key,
    value,
    score=score,
    mask=None if mask is None else _fitting("mask", as_mask(mask), shape),
    bias=None if bias is None else _fitting("bias", as_bias(bias), shape),
    dropout=dropout,
    normalizer=_checked_normalizer(normalizer, score, scores[:-2]),
    scores_shape=scores,
    elements_per_pair=elements_per_pair,
    return_lse=return_lse,
    precision=precision_name(None),
    combined=combined,
  )
  check_row_wise(request.normalizer, scores, request.dtype)
  return request


def _checked_normalizer(
  normalizer: Any, score: Score, leading: tuple[int, ...]
) -> Normalizer:
  """The normalizer, if it fits the score and scores [leading..., T, S]."""
  normalizer = as_normalizer(normalizer)
  if score.denominator is not None and not is_softmax(normalizer):
    raise NotImplementedError(
      f"{type(score).__name__} needs softmax as the normalizer, got "
      f"{normalizer!r}"
    )
  check_parameters(normalizer, leading, may_grow=False)
  return normalizer


def _traced(score: Score, query, key) -> tuple[tuple[int, ...], int]:
  """The shape of the scores and the elements per pair."""
  result, elements_per_pair = trace_score(score, query, key)
  if not hasattr(result, "shape") or jnp.issubdtype(
    result.dtype, jnp.complexfloating
  ):
    raise ValueError(
      f"score must return an array of real numbers, got {result}"
    )
  shape = result.shape
  lengths = (query.shape[-2], key.shape[-2])
  if shape[-2:] != lengths or len(shape) < query.ndim:
    raise ValueError(
      f"score must return [..., T, S] = [..., {lengths[0]}, {lengths[1]}] for "
      f"query {query.shape} and key {key.shape}, it returned {shape}"
    )
  return shape, elements_per_pair


def _fitting(name: str, pairs: Pairwise, shape: tuple[int, ...]):
  """Returns `pairs` if its values broadcast to `shape`, raises otherwise."""
  pairs.check(*shape[-2:])
  rows, columns = (
    jax.ShapeDtypeStruct((length,), jnp.int32) for length in shape[-2:]
  )

  def block_of(rows, columns):
    return jnp.asarray(pairs.block(rows, columns, len(shape) - 2))

  # The error below has the shape of a bias for more heads than the scores have.
  with jax.numpy_rank_promotion("allow"):
    block = jax.eval_shape(block_of, rows, columns)
  if name == "mask" and block.dtype != jnp.bool_:
    raise TypeError(
      "the method block of a mask must return booleans, it returned "
      f"{block.dtype}"
    )
  try:
    fits = jnp.broadcast_shapes(block.shape, shape) == shape
  except ValueError:
    fits = False
  if not fits:
    raise ValueError(
      f"{name} of shape {block.shape} does not broadcast to the scores' {shape}"
    )
  return pairs
