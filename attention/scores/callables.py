"""Functions as scores, of contents alone and of contents and positions."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.scores.base import Score, Wrapper, check_score
from attention.transforms.function_pytree import (
  FunctionPytree,
  called,
  check_takes,
)

_STATIC = types.MappingProxyType({"static": True})
_POSITIONS = ("query_positions", "key_positions")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class FunctionScore(FunctionPytree, Score):
  """A plain callable `(query, key) -> scores` as a score."""

  def pair(self, query, key):
    return called(self.function, query, key)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Positional(FunctionPytree, Score):
  """See `positional`."""

  def pair_at(self, query, key, positions):
    rank = max(query.ndim, key.ndim)
    return called(self.function, query, key, *positions.broadcast(rank))


def positional(function: Callable) -> Score:
  """A score that is a function of contents and positions.

  Args:
    function: (query, key, query_positions, key_positions) -> scores
      [..., T, S], a pure function of blocks of queries [..., T, D] and keys
      [..., S, D]. The positions are int32, [..., T, 1] and [..., 1, S], and
      broadcast to the scores. Arrays that the function closes over receive
      gradients. A score of -inf hides the key.

  Returns:
    A score for `attend`.

  Raises:
    ValueError: if `function` is not callable with these arguments.

  Example:
    >>> import jax.numpy as jnp
    >>> def decaying(query, key, query_positions, key_positions):
    ...   distance = abs(query_positions - key_positions)
    ...   return query @ key.mT - 0.5 * distance
    >>> positional(decaying)(jnp.ones((2, 4)), jnp.ones((3, 4)))
    Array([[4. , 3.5, 3. ],
           [3.5, 4. , 3.5]], dtype=float32)
  """
  _check_callable("function", function)
  arguments = ("query", "key", *_POSITIONS)
  check_takes(function, arguments, "the function of scores.positional")
  return Positional(function)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Modified(Wrapper):
  """See `modified`."""

  modify: Callable[..., jax.Array] = dataclasses.field(metadata=_STATIC)
  with_indices: bool = dataclasses.field(default=False, metadata=_STATIC)
  # (K, G) if heads have these axes.
  grouping: tuple[int, int] | None = dataclasses.field(
    default=None, metadata=_STATIC
  )

  @property
  def reads_positions(self):
    return True

  def pair_at(self, query, key, positions):
    scores = self.score.pair_at(query, key, positions)
    if self.grouping is not None:
      # A tile has all heads, as the last line accepts no others.
      scores = axes.join_axes(scores, -3, *self.grouping)
      positions = positions.with_joined_heads()
    indices = self._indices(scores, positions) if self.with_indices else ()
    at = positions.broadcast(scores.ndim)
    scores = called(self.modify, scores, *indices, *at)
    if self.grouping is not None:
      scores = axes.split_axis(scores, -3, *self.grouping)
    return scores

  def _indices(self, scores, positions):
    """The indices of batch and head, for joined heads."""
    sizes = (1, 1, *scores.shape[:-2])[-2:]
    ones = (1,) * (scores.ndim - 2)

    def index(axis, first=0):
      shape = [*ones, 1, 1]
      if scores.ndim - 2 >= -axis:
        shape[axis - 2] = sizes[axis]
      return jnp.reshape(positions.index(axis, sizes[axis]) + first, shape)

    return index(-2), index(-1, positions.first_head)

  def group_heads(self, num_key_value_heads, num_groups):
    heads = (num_key_value_heads, num_groups)
    score = self.score.group_heads(*heads)
    return dataclasses.replace(self, score=score, grouping=heads)

  def tree_flatten(self):
    static = self.with_indices, self.grouping
    if jax.tree_util.all_leaves([self.modify]):
      return (self.score,), (self.modify, *static)
    return (self.score, self.modify), (None, *static)

  @classmethod
  def tree_unflatten(cls, static, children):
    modify, *rest = static
    score, modify = (*children, modify)[:2]
    return cls(score, modify, *rest)


def modified(
  score: Score, modify: Callable, *, with_indices: bool = False
) -> Score:
  """A score changed by a function of the scores and positions.

  See "FlexAttention: The Flexibility of PyTorch with the Performance of
  FlashAttention", He et al., 2024 (https://pytorch.org/blog/flexattention/),
  where the function is called `score_mod`.

  Args:
    score: a score of `attention.scores`, for instance `scaled_dot()`.
    modify: (scores, query_positions, key_positions) -> scores [..., T, S], a
      pure function of blocks. The positions are int32, [..., T, 1] and
      [..., 1, S], and broadcast to the scores. Arrays that the function closes
      over receive gradients. A score of -inf hides the key.
    with_indices: whether to call `modify` with (scores, batch, head,
      query_positions, key_positions). `batch` and `head` are the indices along
      the axes B and H of scores [B, H, T, S], as arrays that broadcast to them;
      0 for an axis that scores do not have.

  Returns:
    A score for `attend`.

  Raises:
    ValueError: if `score` is not a `Score` or `modify` is not callable with
      these arguments.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> def nearer(scores, query_positions, key_positions):
    ...   return scores - abs(query_positions - key_positions)
    >>> modified(scores.dot(), nearer)(jnp.ones((1, 4)), jnp.ones((3, 4)))
    Array([[4., 3., 2.]], dtype=float32)
  """
  check_score(score)
  _check_callable("modify", modify)
  indices = ("batch", "head") if with_indices else ()
  hint = "" if with_indices else "; with_indices=True adds batch and head"
  check_takes(modify, ("scores", *indices, *_POSITIONS), "modify", hint)
  return Modified(score, modify, with_indices)


def _check_callable(name: str, function: Any) -> None:
  if not callable(function):
    raise ValueError(f"{name} must be a function, got {function!r}")
