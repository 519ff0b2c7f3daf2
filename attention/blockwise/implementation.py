"""The implementation that `attend` calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention.biases.types import Bias
from attention.blockwise import sizes
from attention.blockwise.pairs import Pairs, rows_that_see
from attention.blockwise.problem import (
  fits,
  make_problem,
  numbers_per_pair,
  shapes,
)
from attention.blockwise.rule import solve
from attention.blockwise.tiling import Tiling, with_length
from attention.dropout import Dropout
from attention.masks.types import Mask
from attention.masks.visibility import Ranges, visibility
from attention.pairwise import FULL, PARTIAL
from attention.reference import without_bad_tokens
from attention.scores.protocol import Score


@dataclasses.dataclass(frozen=True)
class Blockwise:
  """The blockwise implementation, with tiles of chosen sizes.

  `implementation="blockwise"` chooses them by itself; where another choice is
  better, pass an instance: `implementation=Blockwise(query_block=128)`.

  Attributes:
    query_block: how many queries a tile has; None chooses.
    key_block: how many keys it has; None chooses.
    leading_block: how many heads and batch entries go through a tile together,
      at most; None chooses.

  Raises:
    ValueError: if a size is not positive.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attend
    >>> tokens = jnp.eye(5)
    >>> small = Blockwise(query_block=2, key_block=2)
    >>> attend(tokens, tokens, tokens, implementation=small).shape
    (5, 5)
  """

  query_block: int | None = None
  key_block: int | None = None
  leading_block: int | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      size = getattr(self, field.name)
      if size is not None and size < 1:
        raise ValueError(f"{field.name} must be at least 1, got {size}")

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    score: Score,
    mask: Mask | None,
    bias: Bias | None,
    dropout: Dropout | None,
  ) -> tuple[jax.Array, jax.Array]:
    """The context and the log-sum-exp; all arrays have the same rank.

    Args:
      query: [..., T, Dq].
      key: [..., S, Dk].
      value: [..., S, E].
      score: a bound score.
      mask: a mask or None.
      bias: a bias or None.
      dropout: dropout of the weights or None; it leaves the lse alone.

    Returns:
      context [..., T, E] and lse [..., T], both in the statistics' dtype.
    """
    dtype = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
    tokens = (query, key, value.astype(jnp.result_type(query, value)))
    masked = mask is not None or bias is not None
    if masked:
      tokens, bad = zip(*map(without_bad_tokens, tokens))
    scores, leading = shapes(score, *tokens)
    length, key_length = scores[-2:]
    if 0 in (*leading, length, key_length):
      return (
        jnp.zeros((*leading, length, value.shape[-1]), dtype),
        jnp.full((*leading, length), -jnp.inf, dtype),
      )
    tiling = self._tiling(score, tokens, scores, leading, mask)
    pairs = Pairs(tiling, length, key_length, mask, bias, dtype)
    query, key, value = map(
      with_length,
      tokens,
      (tiling.query_length, tiling.key_length, tiling.key_length),
    )
    query, key = score.map_query(query), score.map_key(key)
    problem, captured = make_problem(
      score, pairs, dropout, leading if masked else scores[:-2], query, key
    )
    context, lse = solve(problem, captured, query, key, value)
    context, lse = context[..., :length, :], lse[..., :length]
    if masked:
      context, lse = _poisoned(pairs, context, lse, *bad)
    return context, jnp.broadcast_to(lse, context.shape[:-1])

  def _tiling(self, score, tokens, scores, leading, mask) -> Tiling:
    *scores_leading, length, key_length = scores
    numbers = numbers_per_pair(score, *tokens[:2])
    queries = sizes.side(length, self.query_block, numbers)
    keys = sizes.side(key_length, self.key_block, numbers)
    rows, columns = Ranges.cut(length, queries), Ranges.cut(key_length, keys)
    if mask is None:
      seen = np.full((len(rows), len(columns)), FULL, np.int8)
    else:
      seen = visibility(mask, rows, columns)
    if key_length % keys:
      # The last tile reaches over the edge, where there are no keys.
      seen = np.concatenate(
        [seen[:, :-1], np.minimum(seen[:, -1:], PARTIAL)], axis=-1
      )
    block = sizes.leading_block(
      self.leading_block,
      queries * keys * numbers,
      scores_leading,
      leading,
      functools.partial(fits, score, *tokens[:2]),
    )
    return Tiling(leading, block, queries, keys, seen)


def _poisoned(pairs: Pairs, context, lse, bad_query, bad_key, bad_value):
  """NaN in the rows that see a token which is not finite, see `reference`."""

  def see(bad):
    return rows_that_see(pairs, bad)[..., : pairs.length]

  poisoned = see(bad_key) | (bad_query & ~jnp.isneginf(lse))
  lse = jnp.where(poisoned, jnp.nan, lse)
  poisoned = poisoned | see(bad_value)
  return jnp.where(poisoned[..., None], jnp.nan, context), lse
