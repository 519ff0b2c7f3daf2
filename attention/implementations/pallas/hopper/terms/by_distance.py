"""Which scores are dot products and products with vectors of distances."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.arrays import axes
from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.tiles.layout import SIDE
from attention.implementations.pallas.hopper.tiles.look_up import LINE
from attention.implementations.pallas.hopper.tiles.parts import Slice
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  Unsupported,
  aligned_right,
  of_parameter,
)
from attention.implementations.pallas.wrapped import base, offset_of_keys
from attention.request import Request
from attention.scores.relative import Disentangled, Shaw

# Rows of a table that the tensor cores multiply are a multiple.
_ROWS = 8
_FEATURES = 128
# The vectors of a table whose products fit into a block's shared memory.
_MOST = 128


@dataclasses.dataclass(frozen=True)
class Term:
  """Products of queries, or of keys, with a table of vectors.

  Query i and key j have the vector clip(sign (j - i) + size // 2, 0, size - 1).
  """

  table: str  # the name of an input [..., size, D]
  of_keys: bool
  size: int
  sign: int

  @property
  def rows(self) -> int:
    """The lines of a tile of products."""
    return axes.round_up(self.size, _ROWS)

  @property
  def padded(self) -> int:
    """The rows of the table, up to whole tiles."""
    return axes.round_up(self.size, SIDE)

  @property
  def ends(self) -> dict[str, int]:
    """The first and the last vector, by the names of products with them."""
    return {f"{self.table} first": 0, f"{self.table} last": self.size - 1}


@dataclasses.dataclass(frozen=True, eq=False)
class Distances(ScoreTerm):
  """The terms of a score."""

  terms: tuple[Term, ...]
  # Of keys relative to queries: a number, or the name of an input.
  shift: int | str

  def own(self, of_keys: bool) -> list[Term]:
    """The terms of queries, or of keys."""
    return [each for each in self.terms if each.of_keys == of_keys]

  def slices(self, own):
    return {
      each.table: Slice((each.padded, self.differentiable[each.table].core[1]))
      for each in self.own(own == "key")
    }

  def memory(self, kernel):
    """Products of tokens and vectors, and their gradients."""

    def lines(number):
      return plgpu.SMEM((1, number, LINE), jnp.float32)

    gradients = self.own(kernel.own == "key") if kernel.of_gradients else []
    return {
      "products": {each.table: lines(each.rows) for each in self.terms},
      "gradients": {each.table: lines(each.padded) for each in gradients},
    }

  def num_tables(self, kernel, *, is_scarce=False):
    """64 vectors, and the remainders of their rounding.

    Where memory is scarce, remainders are loaded after what they remain of.
    """
    sizes = {x.array.dtype.itemsize for x in self.differentiable.values()}
    return 2 if kernel.of_gradients and sizes != {2} and not is_scarce else 1

  def unused(self, tiles, results, own):
    # Means are written last, see `kernels.sparse`.
    context = "means" if "means" in results else "context"
    names = context, "tokens", "value"
    return [results[name] for name in names if name in results]


def of_request(request: Request, query: Any, key: Any) -> Distances | None:
  """The terms of a score besides the dot product; None if it has none."""
  score, rank = base(request.score), len(request.leading)
  found: list[tuple[str, Any, bool, int]]
  if type(score) is Shaw:
    found = [("relative keys", score.relative_keys, False, 1)]
  elif type(score) is Disentangled:
    sign = -1 if score.as_released else 1
    found = [
      ("relative keys", score.relative_keys, False, -1),
      ("relative queries", score.relative_queries, True, sign),
    ]
  else:
    return None
  tables, terms = {}, []
  for name, array, of_keys, sign in found:
    if array is not None:
      tables[name] = of_parameter(array, 2, rank)
      terms.append(Term(name, of_keys, tables[name].core[0], sign))
      _check(terms[-1], tables[name], query, request)
  shift, numbers = _shift(request.score)
  ends = _ends_of_keys(terms, tables, key, rank)
  return Distances(
    tuple(terms),
    shift,
    differentiable=tables,
    constants=numbers | ends,
    unread_by_keys=ends,
    for_keys=[name for x in terms if not x.of_keys for name in x.ends],
  )


def _check(term: Term, table: Operand, query: Any, request: Request) -> None:
  if term.size > _MOST:
    raise Unsupported(f"has at most {_MOST} distances, got {term.size}")
  if query.shape[-1] > _FEATURES:
    raise Unsupported(
      f"has vectors of distances of at most {_FEATURES} features, got "
      f"{query.shape[-1]}"
    )
  dtypes = request.query.dtype, table.array.dtype
  if dtypes[1] != dtypes[0] and dtypes != (jnp.bfloat16, jnp.float32):
    raise Unsupported(
      "has vectors of distances of the tokens' dtype, or of float32 with "
      f"tokens of bfloat16, got {dtypes[1]} and {dtypes[0]}"
    )


def _shift(score: Any) -> tuple[int | str, dict[str, Operand]]:
  """The position of the first key relative to the first query."""
  shift = offset_of_keys(score)
  if isinstance(shift, int):
    return shift, {}
  name = "shift of keys"
  array = jnp.asarray(shift, jnp.int32)
  return name, {name: Operand(array, Kind.SCALAR, ())}


def _ends_of_keys(
  terms: Sequence[Term],
  tables: Mapping[str, Operand],
  key: jax.Array,
  rank: int,
) -> dict[str, Operand]:
  """The products of keys with the ends of their tables, [..., S]."""
  key = jax.lax.stop_gradient(key).astype(jnp.float32)
  found = {}
  for term in terms:
    table = jax.lax.stop_gradient(tables[term.table].array)
    for name, place in term.ends.items():
      if term.of_keys:
        vector = table[..., place, :][..., None, :].astype(jnp.float32)
        numbers = jnp.sum(jnp.multiply(*axes.aligned(key, vector)), axis=-1)
        leading = aligned_right(numbers.shape[:-1], rank)
        found[name] = Operand(numbers, Kind.ROW, leading)
  return found
