"""One visit of a tile by a kernel for TPUs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.evaluation import Rules
from attention.implementations.pallas.operands import Kind
from attention.implementations.pallas.tpu import whole
from attention.implementations.pallas.tpu.additive import weighted_tanh_sum
from attention.implementations.pallas.tpu.look_up import by_distance
from attention.implementations.pallas.tpu.normalization import (
  weights_and_gradient,
)
from attention.implementations.pallas.tpu.tokens import LANES
from attention.implementations.pallas.visits import FIRST, HIDDEN, LAST, MASKED


def rules(interpret: Any) -> Rules:
  """How kernels evaluate traced operations."""
  return Rules(
    {"by_distance": by_distance, "sign": _sign},
    bool(interpret),
    weighted_tanh_sum,
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Visit:
  """The tile that an instance of a kernel computes."""

  problem: Any  # a `tpu.Problem`
  number: Any
  indices: tuple[Any, ...]
  row: Any
  column: Any
  flags: Any
  groups: Any  # those of all visits, or None; see `Visits`

  def has(self, flag: int):
    """Whether a flag is set."""
    return (self.flags & flag) != 0

  def starts(self, *, is_shared: bool):
    """Whether this is the first visit of a tile of keys or values.

    A tile that groups do not share is another one in each group.
    """
    if is_shared or self.groups is None:
      return self.has(FIRST)
    before = self.groups[jnp.maximum(self.number - 1, 0)]
    return self.has(FIRST) | (self.groups[self.number] != before)

  def ends(self, *, is_shared: bool):
    """Whether this is the last visit of a tile of keys or values."""
    if is_shared or self.groups is None:
      return self.has(LAST)
    last = self.groups.shape[0] - 1
    after = self.groups[jnp.minimum(self.number + 1, last)]
    return self.has(LAST) | (self.groups[self.number] != after)

  def either(self, update: Callable[[bool], None]) -> None:
    """Calls `update` with whether the tile needs the mask, unless hidden."""
    if self.problem.functions.visible is None:
      pl.when(~self.has(HIDDEN))(lambda: update(False))
      return
    pl.when((self.flags & (HIDDEN | MASKED)) == 0)(lambda: update(False))
    pl.when((self.flags & (HIDDEN | MASKED)) == MASKED)(lambda: update(True))

  def chunks(self) -> list[slice]:
    """The rows of the tile, in chunks."""
    queries, size = self.problem.tile[0], self.problem.chunk
    return [slice(n, n + size) for n in range(0, queries, size)]

  def parts(self, refs) -> list[jax.Array]:
    """The parts of all operands for this tile."""
    parts = []
    for operand, ref in zip(self.problem.functions.operands, refs, strict=True):
      if operand.kind is Kind.SCALAR:
        flat = jnp.int32(0)
        for axis, size in zip(operand.axes, operand.array.shape):
          flat = flat * size + (0 if axis is None else self.indices[axis])
        parts.append(ref[flat])
      elif operand.kind is Kind.COLUMN:
        parts.append(as_column(ref[...]))
      elif operand.kind is Kind.WHOLE:
        parts.append(whole.loaded(ref[...], operand))
      else:
        parts.append(ref[...])
    return parts

  def scores(self, query, key, parts, rows, masked, wanted=None, of_keys=False):
    """Scores [r, s] of a chunk of queries, and the function of gradients.

    For `Quotient` the scores are a pair.
    """
    # The gradients are those of the query, or of the key, and of the `wanted`
    # parts of the score and the bias.
    problem, where = self.problem, self._start(rows)
    chunked = [
      part[rows, :] if operand.kind in (Kind.COLUMN, Kind.TILE) else part
      for operand, part in zip(problem.functions.operands, parts)
    ]
    tokens = [*map(_wide, (query, key))]

    def before_mask(token, some):
      own, pair = [*chunked], [*tokens]
      pair[of_keys] = token
      for number, part in zip(wanted or (), some):
        own[number] = part
      of_pair, of_bias, *_ = problem.functions.split(own)
      scores = problem.functions.pair((*pair, *where), of_pair)
      scores = jax.tree.map(lambda each: each.astype(problem.dtype), scores)
      if problem.functions.bias is None:
        return scores
      bias = problem.functions.bias(where, of_bias)
      bias = bias.astype(problem.dtype)
      scores = jax.tree.map(lambda each: each + bias, scores)
      if not problem.bias_may_hide:
        return scores
      # The scores of hidden pairs may be infinite.
      hidden = bias == -jnp.inf
      return jax.tree.map(
        lambda each: jnp.where(hidden, -jnp.inf, each), scores
      )

    if wanted is None:
      scores, pull_back = before_mask(tokens[of_keys], []), None
    else:
      some = [_wide(chunked[number]) for number in wanted]
      scores, pull_back = jax.vjp(before_mask, tokens[of_keys], some)
    if masked:
      visible = problem.functions.visible(
        where, problem.functions.split(chunked)[2]
      )
      scores = jax.tree.map(
        lambda each: jnp.where(visible, each, -jnp.inf), scores
      )
    return scores, pull_back

  def weights(self, scores, value, parts, rows, numbers):
    """The weights of a chunk, and the cotangents of the scores.

    `numbers` are those of the rows of the chunk.
    """
    problem = self.problem
    of_weights = problem.product(numbers.cotangent, value, (1, 1), value.dtype)
    if problem.functions.multiplier is None:
      return weights_and_gradient(problem, scores, numbers, of_weights)
    factors = self._factors(parts, rows)
    weights, of_scores = weights_and_gradient(
      problem, scores, numbers, of_weights * factors
    )
    return weights * factors, of_scores

  def dropped(self, weights, parts, rows):
    """The weights of a chunk after dropout."""
    if self.problem.functions.multiplier is None:
      return weights
    return weights * self._factors(parts, rows)

  def _factors(self, parts, rows):
    where = self._start(rows)
    own = self.problem.functions.split(parts)[3]
    return self.problem.functions.multiplier(where, own)

  def _start(self, rows):
    """The position of a chunk, and the indices of its leading axes."""
    queries, keys = self.problem.tile
    first = self.row * queries + rows.start, self.column * keys
    return (*first, *self.indices)


def _sign(numbers: jax.Array) -> jax.Array:
  # JAX's own cannot be compiled for a TPU that is absent.
  negative = jnp.where(numbers < 0, -1, numbers)
  return jnp.where(numbers > 0, 1, negative).astype(numbers.dtype)


def _wide(array: jax.Array) -> jax.Array:
  return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def as_row(column: jax.Array) -> jax.Array:
  """[n, 1] to [1, n]."""
  return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1, :]


def as_column(row: jax.Array) -> jax.Array:
  """[1, n] to [n, 1]."""
  return jnp.broadcast_to(row, (8, row.shape[-1])).T[:, :1]
