"""The arrays that the kernels of gradients write, for Hopper GPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.pallas.hopper.block.gradient_rows import (
  MASKED_ROWS,
  ROWS,
)
from attention.implementations.pallas.hopper.block.shared_tokens import (
  BatchSplit,
  batch_split,
)
from attention.implementations.pallas.hopper.tiles import parts
from attention.implementations.pallas.hopper.tiles.layout import Axes, Output
from attention.implementations.pallas.hopper.tiles.parts import Slice
from attention.implementations.pallas.operands import Kind


def of_tokens(
  problem: Any, tokens, axes: Axes, entries: BatchSplit | None = None
) -> Output:
  """What a kernel returns for the gradient of tokens.

  It adds the entries of a block, if these are all that share the tokens.
  """
  length, size = tokens.shape[-2:]
  dtype = _sum_dtype(problem, tokens)
  is_wide = axes is Axes.STAGED and dtype == jnp.float32
  if axes is Axes.CHANNELS or is_wide:
    shape = (size, *problem.leading, length)
    return Output(jax.ShapeDtypeStruct(shape, jnp.float32), Axes.CHANNELS)
  if entries is not None and _are_shared(problem, tokens, entries):
    shape = (entries.parts, *tokens.shape)
    return Output(jax.ShapeDtypeStruct(shape, jnp.float32), Axes.SUMS)
  shape = (*problem.leading, length, size)
  return Output(jax.ShapeDtypeStruct(shape, dtype), axes)


def _are_shared(problem: Any, tokens: jax.Array, entries: BatchSplit) -> bool:
  """Whether the entries of a block are all that share the same tokens."""
  sizes = enumerate(tokens.shape[:-2])
  shared = [n for n, size in sizes if size < problem.leading[n]]
  return bool(shared) and tuple(shared) == entries.shared


def _sum_dtype(problem: Any, tokens) -> Any:
  """That of sums if a gradient is summed over leading axes."""
  return tokens.dtype if tokens.shape[:-2] == problem.leading else jnp.float32


def entries(problem: Any, key: jax.Array) -> BatchSplit:
  """The entries of the leading axes that a block of keys computes."""
  return batch_split(problem.leading, key.shape[:-2], problem.tiles.shape[1])


def for_keys(problem: Any, query: jax.Array) -> dict[str, Output]:
  """What the kernel of queries writes for the kernel of keys."""
  lengths = (*problem.leading, query.shape[-2])
  of_rows = Output(jax.ShapeDtypeStruct(lengths, jnp.float32), Axes.ROWS)
  names = MASKED_ROWS if problem.is_masked else ROWS
  names = *names, *problem.own_numbers, *problem.term.for_keys
  return dict.fromkeys(names, of_rows)


def numbers(problem: Any, own: str, names: Sequence[str]) -> list[str]:
  """The numbers whose gradients the kernel of own tokens sums over pairs."""
  kinds = {"key": (Kind.ROW,), "query": (Kind.SCALAR, Kind.COLUMN)}[own]
  return [name for name in names if problem.differentiable[name].kind in kinds]


def of_numbers(problem: Any, names: Sequence[str]) -> dict[str, Output]:
  """The sums over the pairs of own tokens, or of their tiles."""

  def output(kind):
    length, axes = problem.padded_lengths[kind is Kind.ROW], Axes.ROWS
    if kind is Kind.SCALAR:
      length, axes = len(problem.tiles), Axes.NUMBERS
    shape = (*problem.leading, length)
    return Output(jax.ShapeDtypeStruct(shape, jnp.float32), axes)

  return {name: output(problem.differentiable[name].kind) for name in names}


def slices(problem: Any, own: str) -> dict[str, Slice]:
  """What the kernel of own tokens can add to gradients of arrays."""
  found: dict[str, Slice] = {}
  for each in problem.terms:
    found |= each.slices(own)
  if problem.of_bias is not None and own == "query":
    found |= problem.of_bias.slices()
  return found


def of_parts(
  problem: Any, own: str, names: Sequence[str]
) -> tuple[dict[str, Output], int]:
  """The parts of wanted arrays, and the blocks for each leading entry."""
  wanted = {n: x for n, x in slices(problem, own).items() if n in names}
  rows = problem.tiles.shape[1 if own == "key" else 0]
  if not wanted:
    return {}, rows
  blocks = parts.num_blocks(problem.leading, rows)
  return {
    name: parts.output(
      problem.leading, problem.operands[name], each.core, blocks
    )
    for name, each in wanted.items()
  }, blocks
