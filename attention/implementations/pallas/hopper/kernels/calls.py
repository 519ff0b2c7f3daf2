"""Calls of the kernels for Hopper GPUs."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.pallas.hopper.kernels import (
  gradient,
  inputs,
  outputs,
)
from attention.implementations.pallas.hopper.kernels.forward import (
  block_of_queries,
  online_softmax,
)
from attention.implementations.pallas.hopper.kernels.launch import launch
from attention.implementations.pallas.hopper.kernels.sparse import (
  sparse_context,
)
from attention.implementations.pallas.hopper.scores.channels import FunctionSum
from attention.implementations.pallas.hopper.tiles import parts
from attention.implementations.pallas.hopper.tiles.layout import Axes, Output
from attention.implementations.pallas.hopper.tiles.parts import Parts
from attention.implementations.pallas.operands import Kind, summed
from attention.implementations.pallas.results import Results
from attention.softmax import Statistics


class Arrays(NamedTuple):
  """The arrays that the kernels read besides rows."""

  operands: Sequence[jax.Array]
  tokens: Sequence[jax.Array]  # the query, the key and the value


def forward(problem: Any, arrays: Arrays, *, for_gradients: bool) -> Results:
  """The context, and what the gradients need."""
  query, key, value = arrays.tokens
  lengths = (*problem.leading, query.shape[-2])
  rows = Output(jax.ShapeDtypeStruct(lengths, jnp.float32), Axes.ROWS)
  of_context = jax.ShapeDtypeStruct((*lengths, value.shape[-1]), value.dtype)
  written = {
    "context": Output(of_context, Axes.TOKENS),
    "maximum": rows,
    "total": rows,
  }
  compute = online_softmax if problem.sparse is None else sparse_context
  if problem.sparse is not None and for_gradients:
    written["means"] = written["context"]
  is_function = isinstance(problem.channels, FunctionSum)
  if is_function and inputs.token_axes(problem, query, key) is Axes.CHANNELS:
    query, key = (
      _with_nan_tokens(problem, query),
      _with_nan_tokens(problem, key),
    )
  read = inputs.of_forward(problem, arrays.operands, (query, key, value))
  compute_block = functools.partial(block_of_queries, compute=compute)
  results = launch(problem, compute_block, problem.tiles, read, written)
  context, maximum, total, *means = results.values()
  return Results(context, Statistics(maximum, total), *means)


def gradients(
  problem: Any,
  arrays: Arrays,
  rows: Mapping[str, jax.Array],
  names: Sequence[str],
  *,
  of_keys: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """The gradients of tokens, and of the arrays with these names."""
  query, key, value = arrays.tokens
  axes = inputs.token_axes(problem, query, key)
  output = outputs.of_tokens(problem, query, axes)
  made = _of_queries(problem, arrays, rows, names, output)
  of_tokens = [_tokens_last(made["tokens"], output)]
  sums = _sums_of_rows(problem, made, outputs.numbers(problem, "query", names))
  if "weight" in names and problem.projections is None:
    sums["weight"] = _sum_of_weights(problem, made["weight"])
  own_parts = _parts(problem, "query", made)
  # The kernel of keys reads rows that the other completes, which runs in any
  # case.
  by_keys = {
    *outputs.slices(problem, "key"),
    *outputs.numbers(problem, "key", names),
  }
  if of_keys or not by_keys.isdisjoint(names):
    for_keys = {n: made[n] for n in outputs.for_keys(problem, query)}
    for_keys["cotangent"] = rows["cotangent"]
    entries = outputs.entries(problem, key)
    output = outputs.of_tokens(problem, key, axes, entries)
    made = _of_keys(problem, arrays, for_keys, names, output)
    sums |= _sums_of_rows(problem, made, outputs.numbers(problem, "key", names))
    own_parts += _parts(problem, "key", made)
    if of_keys:
      of_values = outputs.of_tokens(problem, value, Axes.TOKENS, entries)
      of_tokens += [
        _tokens_last(made["tokens"], output),
        _tokens_last(made["value"], of_values),
      ]
  sums |= parts.sums(problem, own_parts)
  return of_tokens, [sums[name] for name in names]


def _of_queries(
  problem: Any, arrays: Arrays, rows, names: Sequence[str], of_tokens: Output
) -> dict[str, jax.Array]:
  """The results of the kernel of queries, by name."""
  operands, tokens = arrays
  written = {"tokens": of_tokens}
  if "weight" in names and problem.projections is None:
    written["weight"] = of_tokens
  numbers = outputs.numbers(problem, "query", names)
  written |= outputs.of_numbers(problem, numbers)
  own_parts, blocks = outputs.of_parts(problem, "query", names)
  return launch(
    problem,
    functools.partial(gradient.gradients, wanted=numbers),
    problem.tiles,
    inputs.of_gradients(problem, "query", operands, tokens, rows),
    written | own_parts | outputs.for_keys(problem, tokens[0]),
    of_gradients=True,
    blocks=blocks,
  )


def _of_keys(
  problem: Any, arrays: Arrays, rows, names: Sequence[str], of_tokens: Output
) -> dict[str, jax.Array]:
  """The results of the kernel of keys, by name."""
  operands, tokens = arrays
  _, key, value = tokens
  entries = outputs.entries(problem, key)
  of_values = outputs.of_tokens(problem, value, Axes.TOKENS, entries)
  written = {"tokens": of_tokens, "value": of_values}
  numbers = outputs.numbers(problem, "key", names)
  written |= outputs.of_numbers(problem, numbers)
  own_parts, blocks = outputs.of_parts(problem, "key", names)
  return launch(
    problem,
    functools.partial(gradient.gradients, wanted=numbers),
    problem.tiles.T,
    inputs.of_gradients(problem, "key", operands, tokens, rows),
    written | own_parts,
    are_keys_own=True,
    of_gradients=True,
    blocks=blocks,
    entries=entries,
  )


def _parts(
  problem: Any, own: str, made: Mapping[str, jax.Array]
) -> list[Parts]:
  """The parts of gradients that a kernel has made."""
  return [
    Parts(made[name], outputs.num_blocks(problem, own), name, each.first)
    for name, each in outputs.slices(problem, own).items()
    if name in made
  ]


def _sums_of_rows(
  problem: Any, made, names: Sequence[str]
) -> dict[str, jax.Array]:
  """The gradients of numbers, from those for each query, key or tile."""
  sums = {}
  for name in names:
    operand, numbers = problem.differentiable[name], made[name]
    if operand.kind is Kind.SCALAR:
      numbers = jnp.sum(numbers, -1)
    sums[name] = summed(numbers, operand, problem.leading)
  return sums


def _sum_of_weights(problem: Any, numbers: jax.Array) -> jax.Array:
  by_entry = jnp.moveaxis(jnp.sum(numbers, -1), 0, -1)
  return summed(by_entry, problem.operands["weight"], problem.leading)


def _with_nan_tokens(problem: Any, tokens: jax.Array) -> jax.Array:
  """Tokens of NaN for those with NaN or infinity, if keys may be hidden."""
  # A function of the user may make a number of a feature that is NaN.
  if not problem.is_masked:
    return tokens
  is_bad = ~jnp.all(jnp.isfinite(tokens), axis=-1)
  return jnp.where(is_bad[..., None], jnp.nan, tokens)


def _tokens_last(gradient: jax.Array, output: Output) -> jax.Array:
  """A gradient as [..., T, D]."""
  if output.axes is Axes.SUMS:
    return gradient[0] if len(gradient) == 1 else jnp.sum(gradient, axis=0)
  is_channels = output.axes is Axes.CHANNELS
  return jnp.moveaxis(gradient, 0, -1) if is_channels else gradient
