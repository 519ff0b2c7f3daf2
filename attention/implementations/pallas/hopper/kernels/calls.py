"""Calls of the kernels for Hopper GPUs."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays.softmax import Statistics
from attention.implementations.pallas.hopper.block import memory
from attention.implementations.pallas.hopper.block.shared_tokens import (
  BatchSplit,
)
from attention.implementations.pallas.hopper.kernels import (
  array_of_pairs,
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
from attention.implementations.pallas.hopper.scores.function_sum import (
  FunctionSum,
)
from attention.implementations.pallas.hopper.tiles import parts
from attention.implementations.pallas.hopper.tiles.layout import (
  Axes,
  Kernel,
  Output,
)
from attention.implementations.pallas.hopper.tiles.parts import Parts
from attention.implementations.pallas.operands import Kind, summed
from attention.implementations.pallas.results import Results


class Arrays(NamedTuple):
  """The arrays that the kernels read besides rows."""

  operands: Sequence[jax.Array]
  tokens: Sequence[jax.Array]  # the query, the key and the value


def forward(problem: Any, arrays: Arrays, *, for_gradients: bool) -> Results:
  """The context, and what the gradients need."""
  kernel = _of_context(problem, arrays, for_gradients=for_gradients)
  compute = online_softmax if problem.sparse is None else sparse_context
  compute_block = functools.partial(block_of_queries, compute=compute)
  results = launch(problem, kernel, compute_block)
  context, maximum, total, *means = results.values()
  return Results(context, Statistics(maximum, total), *means)


def _of_context(problem: Any, arrays: Arrays, *, for_gradients: bool) -> Kernel:
  """The forward kernel."""
  query, key, value = arrays.tokens
  lengths = (*problem.leading, query.shape[-2])
  rows = Output(jax.ShapeDtypeStruct(lengths, jnp.float32), Axes.ROWS)
  of_context = jax.ShapeDtypeStruct((*lengths, value.shape[-1]), value.dtype)
  written = {
    "context": Output(of_context, Axes.TOKENS),
    "maximum": rows,
    "total": rows,
  }
  if problem.sparse is not None and for_gradients:
    written["means"] = written["context"]
  is_function = isinstance(problem.channels, FunctionSum)
  if is_function and inputs.token_axes(problem, query, key) is Axes.CHANNELS:
    query, key = (_with_nan_tokens(problem, each) for each in (query, key))
  tokens = query, key, value
  return Kernel(
    inputs.of_kernel(problem, "query", arrays.operands, tokens, {}),
    written,
    len(problem.tiles),
    BatchSplit(problem.leading),
  )


def gradients(
  problem: Any,
  arrays: Arrays,
  rows: Mapping[str, jax.Array],
  names: Sequence[str],
  *,
  of_keys: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """The gradients of tokens, and of the arrays with these names."""
  run = functools.partial(_run, problem, arrays)
  _, *others = array_of_pairs.groups(problem, names)
  first = [name for name in names if name not in itertools.chain(*others)]
  made, sums, own_parts = run("query", rows, first)
  for group in others:
    sums |= run("query", rows, group)[1]
  of_tokens = [made["tokens"]]
  # The kernel of keys reads rows that the other completes, which runs in any
  # case.
  by_keys = {
    *outputs.slices(problem, "key"),
    *outputs.numbers(problem, "key", names),
  }
  if of_keys or not by_keys.isdisjoint(names):
    for_keys = {n: made[n] for n in outputs.for_keys(problem, arrays.tokens[0])}
    for_keys["cotangent"] = rows["cotangent"]
    made, of_rows, parts_of_keys = run("key", for_keys, names)
    sums |= of_rows
    own_parts += parts_of_keys
    if of_keys:
      of_tokens += [made["tokens"], made["value"]]
  sums |= parts.sums(problem, own_parts)
  return of_tokens, [sums[name] for name in names]


def _run(
  problem: Any,
  arrays: Arrays,
  own: str,
  rows: Mapping[str, jax.Array],
  names: Sequence[str],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], list[Parts]]:
  """What a kernel makes for arrays: its outputs, their gradients, and parts."""
  kernel = _of_gradients(problem, own, arrays, rows, names)
  wanted = outputs.numbers(problem, own, names)
  compute = functools.partial(gradient.gradients, wanted=wanted)
  made = launch(problem, kernel, compute)
  slices = outputs.slices(problem, own)
  own_parts = [
    Parts(made[name], kernel.blocks, name, each.first)
    for name, each in slices.items()
    if name in made
  ]
  sums = {
    name: _gradient(problem, name, made[name])
    for name in names
    if name in made and name not in slices
  }
  for name in ("tokens", "value"):
    if name in made:
      made[name] = _tokens_last(made[name], kernel.outputs[name])
  return made, sums, own_parts


def _gradient(problem: Any, name: str, numbers: jax.Array) -> jax.Array:
  """The gradient of an array, from that of each query, key, tile or entry."""
  operand = problem.differentiable[name]
  if operand.kind is Kind.TILE:
    return array_of_pairs.total(numbers, operand)
  if name == "weight":
    numbers = jnp.moveaxis(jnp.sum(numbers, -1), 0, -1)
  elif operand.kind is Kind.SCALAR:
    numbers = jnp.sum(numbers, -1)
  return summed(numbers, operand, problem.leading)


def _of_gradients(
  problem: Any, own: str, arrays: Arrays, rows, names: Sequence[str]
) -> Kernel:
  """The kernel of the gradients of own tokens, and of arrays."""
  operands, (query, key, value) = arrays
  axes = inputs.token_axes(problem, query, key)
  numbers = outputs.numbers(problem, own, names)
  own_parts, blocks = outputs.of_parts(problem, own, names)
  of_sums = outputs.of_numbers(problem, numbers) | own_parts
  if own == "query":
    written = {"tokens": outputs.of_tokens(problem, query, axes)}
    if "weight" in names and not problem.term.is_projection:
      written["weight"] = written["tokens"]
    of_pairs = array_of_pairs.names_of(problem, names)
    entries = array_of_pairs.entries(problem, of_pairs)
    of_sums |= array_of_pairs.outputs(problem, of_pairs, entries)
    of_sums |= outputs.for_keys(problem, query)
  else:
    entries = outputs.entries(problem, key)
    written = {
      "tokens": outputs.of_tokens(problem, key, axes, entries),
      "value": outputs.of_tokens(problem, value, Axes.TOKENS, entries),
    }
  return Kernel(
    inputs.of_kernel(problem, own, operands, arrays.tokens, rows),
    written | of_sums,
    blocks,
    entries,
    own,
    of_gradients=True,
  )


def forward_fits(problem: Any, arrays: Arrays) -> bool:
  """Whether a block of the forward kernel has enough shared memory."""
  return _fits(problem, _of_context(problem, arrays, for_gradients=True))


def gradients_fit(problem: Any, arrays: Arrays) -> bool:
  """Whether blocks of the kernels of gradients have enough shared memory."""
  query, _, value = arrays.tokens
  lengths = (*problem.leading, query.shape[-2])
  tokens = jnp.zeros((*lengths, value.shape[-1]), value.dtype)
  rows = dict.fromkeys(["maximum", "total", "of_total"], jnp.zeros(lengths))
  rows |= {"context": tokens, "cotangent": tokens}
  for_keys = dict.fromkeys(outputs.for_keys(problem, query), rows["total"])
  for_keys["cotangent"] = tokens
  names = [*problem.differentiable]
  return all(
    _fits(problem, _of_gradients(problem, own, arrays, each, names))
    for own, each in (("query", rows), ("key", for_keys))
  )


def _fits(problem: Any, kernel: Kernel) -> bool:
  return memory.fits(memory.of_block(problem, kernel))


def _with_nan_tokens(problem: Any, tokens: jax.Array) -> jax.Array:
  """Tokens of NaN for those with NaN or infinity, if keys may be hidden."""
  # A function of the user may make a number of a feature that is NaN.
  if not problem.is_masked:
    return tokens
  is_finite = jnp.all(jnp.isfinite(tokens), axis=-1)
  return jnp.where(is_finite[..., None], tokens, jnp.nan)


def _tokens_last(gradient: jax.Array, output: Output) -> jax.Array:
  """A gradient as [..., T, D]."""
  if output.axes is Axes.SUMS:
    return gradient[0] if len(gradient) == 1 else jnp.sum(gradient, axis=0)
  is_channels = output.axes is Axes.CHANNELS
  return jnp.moveaxis(gradient, 0, -1) if is_channels else gradient
