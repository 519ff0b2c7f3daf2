"""Refuses functions of the user that are not functions of pairs.

`attend` calls a score on blocks of queries and keys. The result of a score
that numbers, sums, shifts or counts the tokens would depend on the blocks. A
trace with longer sequences than any other axis shows which axes are of tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from attention.scores.base import Score, Wrapper
from attention.scores.callables import Modified, Positional
from attention.scores.tile_positions import Positions, all_positions
from attention.transforms.dependence import (
  combined_entries,
  combines_entries,
  longest_axis,
  multiple_above,
  numbers,
  traced_longer,
)
from attention.transforms.function_pytree import (
  FunctionPytree,
  is_of_this_package,
)

_RULE = (
  "score must be a function of pairs of a query and a key, because attend "
  "calls it on blocks of queries and keys, but it {}. A function of positions "
  "is attention.scores.positional(function), which calls function(query, key, "
  "query_positions, key_positions); an array [..., T, S] is a bias. To change "
  "all queries or keys, do it before attend."
)
_TOKENS = "the queries or the keys"
_TILE_RULE = (
  "pair_at of the score {} must return scores [..., t, s] of a tile of t "
  "queries and s keys, but for {} queries and {} keys it {}. positions.query "
  "is [t] and positions.key is [s]; positions.broadcast(rank) has them as "
  "[..., t, 1] and [..., 1, s]."
)


class _PairFunction(NamedTuple):
  """A function of the user, as a function of arrays of pairs."""

  function: Callable
  # The arrays' shapes and dtypes for given numbers of queries and keys.
  shapes: Callable[[int, int], Sequence[Any]]
  closed: ClosedJaxpr | None = None  # if it is traced already

  def trace(self, *lengths: int) -> ClosedJaxpr:
    """The function of so many queries and keys."""
    return jax.make_jaxpr(self.function)(*self.shapes(*lengths))


def pair_jaxpr(
  score: Score, query, key, positions: Callable = all_positions
) -> tuple[ClosedJaxpr, Any]:
  """The score of mapped tokens as a jaxpr, and the shape of its result."""

  def pair(query, key):
    return score.pair_at(query, key, positions(query, key))

  return jax.make_jaxpr(pair, return_shape=True)(query, key)


def check_pairwise(score: Score, query, key, closed: ClosedJaxpr) -> None:
  """Raises ValueError if a function of the user depends on other tokens.

  Args:
    score: the score.
    query: mapped queries [..., T, X].
    key: mapped keys [..., S, Y].
    closed: the score's jaxpr.
  """
  for each in _functions(score, query, key, closed):
    _check(each, query.shape[-2], key.shape[-2])
  if score.reads_positions and not all(map(_is_ours, _chain(score))):
    _check_tile(score, query, key)


def _functions(score: Score, query, key, closed) -> Iterator[_PairFunction]:
  """The functions of the user in a score, as functions of pairs."""
  inner = score
  while inner.reads_positions and isinstance(inner, Wrapper):
    if isinstance(inner, Modified):
      yield _of_scores(inner, query, key)
    if not _is_ours(inner) and type(inner).map_query is not Wrapper.map_query:
      return  # Its mapped tokens may not be those of the score inside.
    query, key = inner.inner_tokens(query, key)
    inner = inner.score

  def tokens(length, key_length):
    return [
      jax.ShapeDtypeStruct((*x.shape[:-2], n, x.shape[-1]), x.dtype)
      for x, n in ((query, length), (key, key_length))
    ]

  if isinstance(inner, Positional):
    rank = max(query.ndim, key.ndim)
    yield _PairFunction(
      inner.function, lambda *sizes: [*tokens(*sizes), *_at(rank, *sizes)]
    )
  elif not inner.reads_positions and not _is_ours([*_chain(inner)][-1]):
    # Additive scores, which are ours, choose a formula by the largest token.
    yield _PairFunction(
      lambda query, key: inner.pair_at(query, key, all_positions(query, key)),
      tokens,
      closed if inner is score else None,
    )


def _of_scores(modified: Modified, query, key) -> _PairFunction:
  """The function of a modified score."""
  scores = pair_jaxpr(modified.score, query, key)[1]
  leading, rank = scores.shape[:-2], len(scores.shape)
  if modified.grouping is not None:
    heads = modified.grouping[0] * modified.grouping[1]
    leading, rank = (*leading[:-2], heads), rank - 1
  index = jax.ShapeDtypeStruct((1,) * rank, jnp.int32)
  indices = [index] * 2 if modified.with_indices else []

  def shapes(*sizes):
    pairs = jax.ShapeDtypeStruct((*leading, *sizes), scores.dtype)
    return [pairs, *indices, *_at(rank, *sizes)]

  return _PairFunction(modified.modify, shapes)


def _at(rank: int, length: int, key_length: int) -> list[Any]:
  """The positions [..., T, 1] and [..., 1, S]."""
  ones = (1,) * (rank - 2)
  return [
    jax.ShapeDtypeStruct((*ones, length, 1), jnp.int32),
    jax.ShapeDtypeStruct((*ones, 1, key_length), jnp.int32),
  ]


def _check(function: _PairFunction, length: int, key_length: int) -> None:
  closed = function.closed or function.trace(length, key_length)
  longest = longest_axis(closed)
  # Multiples, since a function may split the tokens; different ones, since a
  # function may add queries to keys.
  sizes = {
    "queries": multiple_above(length, longest),
    "keys": multiple_above(key_length, longest),
  }
  sizes["keys"] += key_length * (sizes["keys"] == sizes["queries"])
  longer = traced_longer(function.trace, sizes, _RULE)
  if found := combined_entries(longer, longest):
    raise ValueError(_RULE.format(f"{found} {_TOKENS}"))
  if numbers(closed) != numbers(longer):
    again = function.trace(length, key_length)
    if numbers(closed) == numbers(again):  # else the function is not pure
      problem = "depends on the number of queries or keys"
      raise ValueError(_RULE.format(problem))


def _check_tile(score: Score, query, key) -> None:
  """Raises ValueError unless a user's `pair_at` keeps both axes of tokens."""
  length, key_length = query.shape[-2], key.shape[-2]
  if length != key_length or not isinstance(length, int):
    return  # The scores of all tokens have shown it.
  length += 1
  query, key = (
    jax.ShapeDtypeStruct((*x.shape[:-2], n, x.shape[-1]), x.dtype)
    for x, n in ((query, length), (key, key_length))
  )
  name = type([*_chain(score)][-1]).__name__
  rule = functools.partial(_TILE_RULE.format, name, length, key_length)
  try:
    shape = pair_jaxpr(score, query, key)[1].shape
  except (TypeError, ValueError) as error:
    message = str(error).rstrip(".")
    problem = f"raises {type(error).__name__}: {message}"
    raise ValueError(rule(problem)) from error
  if shape[-2:] != (length, key_length):
    raise ValueError(rule(f"returns {shape}"))


def follows_leading(score: Score, query, key, axis: int | None = None) -> bool:
  """Whether each entry of the leading axes has scores of its own.

  Args:
    score: the score.
    query: mapped queries [..., T, X].
    key: mapped keys [..., S, Y].
    axis: one of the leading axes, from the right; None means all.
  """
  leading = [size for x in (query, key) for size in x.shape[:-2]]
  if max(leading, default=1) == 1 or all(map(_is_ours, _chain(score))):
    return True
  score = _of_user(score)
  closed, _ = pair_jaxpr(score, query, key, _WithoutIndices.of)
  longest = longest_axis(closed)

  def longer(array):
    sizes = (
      multiple_above(size, longest)
      if size > 1 and axis in (None, number - array.ndim)
      else size
      for number, size in enumerate(array.shape[:-2])
    )
    return jax.ShapeDtypeStruct((*sizes, *array.shape[-2:]), array.dtype)

  def trace_longer():
    tokens = longer(query), longer(key)
    return pair_jaxpr(score, *tokens, _WithoutIndices.of)[0]

  return not combines_entries(closed, trace_longer, longest)


def functions_follow_heads(score: Score, query, key) -> bool:
  """`follows_leading` for heads; a score class of the user is not checked."""
  chain = [*_chain(score)]
  if not all(is_of_this_package(type(each)) for each in chain):
    return True
  return follows_leading(score, query, key, axis=-3)


@dataclasses.dataclass(frozen=True, eq=False)
class _WithoutIndices(Positions):
  """Positions whose indices along leading axes are not numbered."""

  @classmethod
  def of(cls, query, key):
    """All positions."""
    return cls(**vars(all_positions(query, key)))

  def index(self, axis, size):
    """Zeros in place of the indices."""
    del axis
    return jnp.zeros(size, jnp.int32)


def _of_user(score: Score) -> Score:
  """The score, with sums in place of what this package computes of pairs.

  In this package each entry has scores of its own, but arrays may have an
  entry for each head, and additive scores read the largest of all tokens.
  """
  if not isinstance(score, Wrapper):
    return _Sums() if _is_ours(score) else score
  inner = _of_user(score.score)
  maps_alike = type(score).map_query is Wrapper.map_query
  if _is_ours(score) and maps_alike:
    return inner
  return dataclasses.replace(score, score=inner)


class _Sums(Score):
  """A sum for each pair, in place of a score of this package."""

  def pair(self, query, key):
    return query[..., :1] + jnp.swapaxes(key[..., :1], -1, -2)


def _chain(score: Score) -> Iterator[Score]:
  """A score and those inside of it, from the outermost to the innermost."""
  yield score
  while isinstance(score, Wrapper):
    score = score.score
    yield score


def _is_ours(score: Score) -> bool:
  """Whether a score is of this package and holds no function of the user."""
  has_function = isinstance(score, FunctionPytree | Modified)
  return is_of_this_package(type(score)) and not has_function
