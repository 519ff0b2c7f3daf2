"""The interface of scores: two maps of tokens and a function of pairs.

    score(query, key) = pair(map_query(query), map_key(key))

The maps are called once on all tokens, `pair` once per tile. A score is a
pytree, so its arrays receive gradients. Any function `(query, key) -> scores`
is a score too, with identity maps. A score that depends on the positions of
queries and keys defines `pair_at` instead of `pair`.
"""

import dataclasses
from typing import Any

import jax

from attention.arrays import axes
from attention.arrays.equality import EqualByValue
from attention.arrays.head_parameters import SCALAR, grouped
from attention.positional.position_arrays import checked_offset
from attention.scores.tile_positions import Positions, all_positions


class Score(EqualByValue):
  """A score: inherit, override `pair` or `pair_at`, and the maps where useful.

  Example:
    >>> import dataclasses, jax, jax.numpy as jnp
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True, eq=False)
    ... class NegativeDistance(Score):
    ...   def pair(self, query, key):
    ...     gap = query[..., :, None, :] - key[..., None, :, :]
    ...     return -jnp.sum(gap * gap, axis=-1)
    >>> NegativeDistance()(jnp.zeros((2, 3)), jnp.ones((4, 3))).shape
    (2, 4)
  """

  @property
  def reads_positions(self) -> bool:
    """Whether the score depends on positions: it overrides `pair_at`."""
    return type(self).pair_at is not Score.pair_at

  @property
  def reads_keys(self) -> bool:
    """Whether the score depends on the contents of keys."""
    return True

  @property
  def is_finite(self) -> bool:
    """Whether finite tokens have finite scores with finite derivatives.

    Such a score hides no key.
    """
    return False

  @property
  def denominator(self) -> "Score | None":
    """The score d that normalises the weights exp(score) / sum_j exp(d_j).

    None means this score itself, which is a softmax. Both scores must have the
    same `map_query` and `map_key`.
    """
    return None

  def check(self, query: jax.Array, key: jax.Array) -> None:
    """Raises AssertionError if the shapes do not fit; it names the argument."""

  def map_query(self, query: jax.Array) -> jax.Array:
    """[..., T, Dq] to [..., T, X], token by token."""
    return query

  def map_key(self, key: jax.Array) -> jax.Array:
    """[..., S, Dk] to [..., S, Y], token by token."""
    return key

  def pair(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Mapped [..., t, X] and [..., s, Y] to [..., t, s] scores.

    `attend` calls it on tiles, so a score may depend on its own two tokens
    only.
    """
    raise NotImplementedError(
      f"{type(self).__name__} must define pair, or pair_at if it depends on "
      "positions"
    )

  def pair_at(
    self, query: jax.Array, key: jax.Array, positions: Positions
  ) -> jax.Array:
    """`pair` for a score that also depends on the tokens' positions.

    A score may be -inf where it hides a key.
    """
    del positions
    return self.pair(query, key)

  def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """[..., T, Dq] and [..., S, Dk] to [..., T, S]."""
    self.check(query, key)
    positions = all_positions(query, key)
    return self.pair_at(self.map_query(query), self.map_key(key), positions)

  def shifted(self, offset: int | jax.Array) -> "Score":
    """The score for queries that start at position `offset`.

    The offset is one integer, which may be traced; otherwise a ValueError is
    raised. A score that does not depend on positions is returned unchanged.
    """
    return self.placed(checked_offset(offset)) if self.reads_positions else self

  def placed(
    self,
    row: int | jax.Array = 0,
    column: int | jax.Array = 0,
    *,
    key_length: int | None = None,
    first_head: int | jax.Array = 0,
  ) -> "Score":
    """The score for tokens and heads that do not start at 0.

    Queries start at position `row`, keys at `column`, heads at `first_head`.
    `key_length` is the number of all keys; None means that of the arguments.
    """
    if not self.reads_positions:
      return self
    return Placed(self, row, column, first_head, key_length)

  def group_heads(self, num_key_value_heads: int, num_groups: int) -> "Score":
    """The same score for heads laid out as [K, G] instead of [H].

    If every field declares the rank of one head's parameter, for instance by
    `dataclasses.field(metadata=MATRIX)`, parameters [H, ...] become [K, G, ...]
    and [K, ...] become [K, 1, ...]. Any other score is called in the [H]
    layout, which repeats the keys in memory.
    """
    heads = (num_key_value_heads, num_groups)
    return grouped(self, *heads) or GroupedHeads(self, *heads)


def check_score(score: Any) -> None:
  """Raises ValueError unless the argument is a `Score`."""
  if not isinstance(score, Score):
    raise ValueError(
      f"score must be a Score, got {score!r}; attention.scores.as_score makes "
      "one of a function"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper(Score):
  """A score made from another; inherit, and override what differs.

  The pairs of a score may depend on the dtype of mapped tokens, which a wrapper
  must keep.
  """

  score: Score

  def __post_init__(self):
    # In JAX's trees other objects may stand for the score.
    if callable(self.score):
      check_score(self.score)

  @property
  def reads_positions(self):
    return self.score.reads_positions

  @property
  def reads_keys(self):
    return self.score.reads_keys

  @property
  def denominator(self):
    inner = self.score.denominator
    return None if inner is None else dataclasses.replace(self, score=inner)

  def check(self, query, key):
    check_score(self.score)
    self.score.check(query, key)

  def map_query(self, query):
    return self.score.map_query(query)

  def map_key(self, key):
    return self.score.map_key(key)

  def inner_tokens(
    self, query: jax.Array, key: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The tokens that `score` has mapped, from those that this one has."""
    return query, key

  def pair_at(self, query, key, positions):
    return self.score.pair_at(*self.inner_tokens(query, key), positions)

  def group_heads(self, num_key_value_heads, num_groups):
    heads = (num_key_value_heads, num_groups)
    bare = dataclasses.replace(self, score=None)  # type: ignore[arg-type]
    own = grouped(bare, *heads)
    if own is None:
      return GroupedHeads(self, *heads)
    return dataclasses.replace(own, score=self.score.group_heads(*heads))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Placed(Wrapper):
  """A score for other positions and heads, see `Score.placed`."""

  row: int | jax.Array = dataclasses.field(metadata=SCALAR)
  column: int | jax.Array = dataclasses.field(metadata=SCALAR)
  first_head: int | jax.Array = dataclasses.field(metadata=SCALAR)
  key_length: int | None = dataclasses.field(metadata={"static": True})

  def pair_at(self, query, key, positions):
    known = self.key_length is not None
    placed = dataclasses.replace(
      positions,
      query_start=_moved(positions.query_start, self.row),
      key_start=_moved(positions.key_start, self.column),
      key_length=self.key_length if known else positions.key_length,
      first_head=positions.first_head + self.first_head,
    )
    return self.score.pair_at(query, key, placed)


def _moved(start, shift):
  is_zero = isinstance(shift, int) and shift == 0
  return start if is_zero else start + shift


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedHeads(Wrapper):
  """Calls a score that supports heads [H] only, for heads [K, G]."""

  num_key_value_heads: int = dataclasses.field(metadata={"static": True})
  num_groups: int = dataclasses.field(metadata={"static": True})

  def check(self, query, key):
    self.score.check(self._join(query), self._join(key))

  def map_query(self, query):
    return self._split(self.score.map_query(self._join(query)))

  def map_key(self, key):
    if type(self.score).map_key is Score.map_key:
      return key  # `pair_at` then repeats tiles instead of all keys
    return self._split(self.score.map_key(self._join(key)))

  def inner_tokens(self, query, key):
    return self._join(query), self._join(key)

  def pair_at(self, query, key, positions):
    # A tile has all heads, since `_split` accepts no others.
    scores = super().pair_at(query, key, positions.with_joined_heads())
    return self._split(scores)

  def _join(self, tokens):
    """[..., K or 1, G or 1, T, D] to [..., H, T, D]."""
    return axes.join_axes(tokens, -3, self.num_key_value_heads, self.num_groups)

  def _split(self, tokens):
    return axes.split_axis(
      tokens, -3, self.num_key_value_heads, self.num_groups
    )
