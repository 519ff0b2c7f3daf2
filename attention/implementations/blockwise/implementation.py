"""The implementation that `attend` calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention.implementations.blockwise import tile_sizes
from attention.implementations.blockwise.derivative import solve
from attention.implementations.blockwise.positional import Pairs, rows_that_see
from attention.implementations.blockwise.problem import fits, make_problem
from attention.implementations.blockwise.tiles import Tiling, with_length
from attention.masks.tile_visibility import Ranges, visibility
from attention.positional import FULL, PARTIAL
from attention.request import Request, without_bad_tokens


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

  def __call__(self, request: Request) -> tuple[jax.Array, jax.Array]:
    """The context [..., T, E] and the log-sum-exp [..., T] of a request."""
    leading, (length, key_length) = request.leading, request.scores_shape[-2:]
    if not request.has_known_sizes:
      raise NotImplementedError(
        "implementation='blockwise' cuts known sizes into tiles, got scores of "
        f"shape {request.scores_shape}; implementation='reference' is exported "
        "for any size"
      )
    if 0 in (*leading, length, key_length):
      return (
        jnp.zeros((*leading, length, request.value.shape[-1]), request.dtype),
        jnp.full((*leading, length), -jnp.inf, request.dtype),
      )
    tokens, bad = request.tokens, None
    if masked := request.mask is not None or request.bias is not None:
      tokens, bad = zip(*map(without_bad_tokens, tokens))
    query, key, value = tokens
    tiling = self._tiling(request)
    query = request.score.map_query(with_length(query, tiling.query_length))
    key = request.score.map_key(with_length(key, tiling.key_length))
    value = with_length(value, tiling.key_length, "constant")
    value = value.astype(jnp.result_type(request.query, value))
    pairs = Pairs(
      tiling, length, key_length, request.mask, request.bias, request.dtype
    )
    alone = not masked and request.combined is None
    lse_leading = request.scores_shape[:-2] if alone else leading
    problem, captured = make_problem(
      request.score, pairs, request.dropout, lse_leading, query, key
    )
    combined = request.combined and _padded(
      *request.combined, tiling.query_length
    )
    context, lse = solve(problem, captured, query, key, value, combined)
    context, lse = context[..., :length, :], lse[..., :length]
    if bad is not None and combined is None:
      context, lse = _poisoned(pairs, context, lse, *bad)
    return context, jnp.broadcast_to(lse, context.shape[:-1])

  def _tiling(self, request: Request) -> Tiling:
    *scores_leading, length, key_length = request.scores_shape
    numbers = request.elements_per_pair
    queries = tile_sizes.side(length, self.query_block, numbers)
    keys = tile_sizes.side(key_length, self.key_block, numbers)
    rows, columns = Ranges.cut(length, queries), Ranges.cut(key_length, keys)
    if request.mask is None:
      seen = np.full((len(rows), len(columns)), FULL, np.int8)
    else:
      seen = visibility(request.mask, rows, columns)
    if key_length % keys:
      # The last tile reaches over the edge, where there are no keys.
      seen = np.concatenate(
        [seen[:, :-1], np.minimum(seen[:, -1:], PARTIAL)], axis=-1
      )
    block = tile_sizes.leading_block(
      self.leading_block,
      queries * keys * numbers,
      scores_leading,
      request.leading,
      functools.partial(fits, request.score, request.query, request.key),
    )
    return Tiling(request.leading, block, queries, keys, seen)


def _padded(context, lse, length: int):
  """A context and an lse of a whole, with rows that see nothing after them."""
  missing = [(0, length - lse.shape[-1])]
  leading = [(0, 0)] * (lse.ndim - 1)
  return (
    jnp.pad(context, [*leading, *missing, (0, 0)]),
    jnp.pad(lse, [*leading, *missing], constant_values=-jnp.inf),
  )


def _poisoned(pairs: Pairs, context, lse, bad_query, bad_key, bad_value):
  """NaN in the rows that see a token which is not finite, see `reference`."""

  def see(bad):
    return rows_that_see(pairs, bad)[..., : pairs.length]

  poisoned = see(bad_key) | (bad_query & ~jnp.isneginf(lse))
  lse = jnp.where(poisoned, jnp.nan, lse)
  poisoned = poisoned | see(bad_value)
  return jnp.where(poisoned[..., None], jnp.nan, context), lse
