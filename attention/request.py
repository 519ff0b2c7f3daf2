"""A request of `attend`: its arguments, checked and lined up."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention import axes
from attention.biases import Bias, as_bias
from attention.checks import check_axis, check_leading, check_tokens
from attention.dropout import Dropout
from attention.masks.types import Mask, as_mask
from attention.positional import Pairwise
from attention.scores import Score, as_score
from attention.scores.footprint import elements_per_pair

Combined = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """What every implementation is given: arguments that fit together.

  An implementation returns the context [..., T, E] and the lse [..., T], both
  in `dtype` and with the axes `leading`.

  Attributes:
    query: [..., T, Dq]; all three have the same rank.
    key: [..., S, Dk].
    value: [..., S, E].
    score: a bound score.
    mask: a mask or None.
    bias: a bias or None.
    dropout: of the weights, or None; it leaves the lse alone.
    scores_shape: [..., T, S], of what the score returns.
    combined: None; or the context and the lse over more keys than these. An
      implementation returns them then, with these keys' part of their
      derivatives: every derivative is a sum over keys.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  score: Score
  mask: Mask | None
  bias: Bias | None
  dropout: Dropout | None
  scores_shape: tuple[int, ...]
  combined: Combined | None = None

  @property
  def tokens(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The query, the key and the value."""
    return self.query, self.key, self.value

  @property
  def leading(self) -> tuple[int, ...]:
    """The leading axes of the context: of the scores and of the value."""
    return jnp.broadcast_shapes(self.scores_shape[:-2], self.value.shape[:-2])

  @property
  def dtype(self) -> Any:
    """Of the softmax and its statistics, float32 at least."""
    return jnp.promote_types(jnp.result_type(*self.tokens), jnp.float32)

  @property
  def has_known_sizes(self) -> bool:
    """Whether no size is a symbol of `jax.export`."""
    return all(isinstance(size, int) for size in self.scores_shape)

  @functools.cached_property
  def elements_per_pair(self) -> int:
    """How many numbers the score needs at once for a query and a key."""
    return elements_per_pair(self.score, self.query, self.key)


def without_bad_tokens(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Tokens, zero where one holds NaN or inf, and bool [..., T]: which did."""
  bad = ~jnp.all(jnp.isfinite(tokens), axis=-1)
  return jnp.where(bad[..., None], jnp.zeros_like(tokens), tokens), bad


def make_request(
  query: Any,
  key: Any,
  value: Any,
  *,
  score: Score | Callable,
  mask: Any,
  bias: Any,
  dropout: Dropout | None = None,
  combined: Combined | None = None,
) -> Request:
  """Checks the arguments of `attend` and lines their leading axes up.

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk].
    value: [..., S, E].
    score: anything `attention.scores.as_score` takes.
    mask: anything `attention.masks.as_mask` takes, or None.
    bias: anything `attention.biases.as_bias` takes, or None.
    dropout: of the weights, or None.
    combined: the context [..., T, E] and lse [..., T] over more keys, or None.

  Returns:
    The request, ready for an implementation.
  """
  check_tokens(query=query, key=key, value=value)
  query, key, value = (jnp.asarray(array) for array in (query, key, value))
  length = key.shape[-2]
  check_axis(value, "value", -2, length, "key's length")
  check_leading(query=query, key=key, value=value)
  score = as_score(score)
  query, key, value = axes.aligned(query, key, value)
  scores = _scores_shape(score, query, key)
  rank = max(len(scores), value.ndim)
  given = query.ndim
  query, key, value = (axes.with_rank(x, rank) for x in (query, key, value))
  if rank > given:
    _check_rank_of_scores(score, query, key)
  leading = jnp.broadcast_shapes(scores[:-2], value.shape[:-2])
  shape = (*leading, *scores[-2:])
  if mask is not None:
    mask = _fitting("mask", as_mask(mask), shape)
  if bias is not None:
    bias = _fitting("bias", as_bias(bias), shape)
  return Request(
    query, key, value, score, mask, bias, dropout, scores, combined
  )


def _scores_shape(score: Score, query, key) -> tuple[int, ...]:
  """The shape of the scores, found without computing them."""
  result = jax.eval_shape(score, query, key)
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
  return shape


def _check_rank_of_scores(score: Score, query, key) -> None:
  """Raises ValueError if a score has axes in front of those of its arguments.

  What it captures may have as many leading axes as they have, and not more.
  """
  shape = _scores_shape(score, query, key)
  if len(shape) > query.ndim:
    raise ValueError(
      f"score may not add leading axes to those of its arguments: for query "
      f"{query.shape} and key {key.shape} it returned {shape}; let its arrays "
      "broadcast, [H, 1, 1] or einsum('hde,...htd->...hte')"
    )


def _fitting(name: str, pairs: Pairwise, shape: tuple[int, ...]):
  """`pairs`, if its values broadcast to `shape`."""
  query_length, key_length = shape[-2:]
  pairs.check(query_length, key_length)
  rows, columns = (
    jax.ShapeDtypeStruct((length,), jnp.int32) for length in shape[-2:]
  )
  rank = len(shape) - 2
  block = jax.eval_shape(
    lambda rows, columns: jnp.asarray(pairs.block(rows, columns, rank)),
    rows,
    columns,
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
