"""Calls of the kernels for Hopper GPUs."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.pallas.hopper.block import memory
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
from attention.softmax import Statistics


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
    query, key = (
      _with_nan_tokens(problem, query),
      _with_nan_tokens(problem, key),
    )
  tokens = query, key, value
  return Kernel(inputs.of_forward(problem, arrays.operands, tokens), written)


def gradients(
  problem: Any,
  arrays: Arrays,
  rows: Mapping[str, jax.Array],
  names: Sequence[str],
  *,
  of_keys: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """The gradients of tokens, and of the arrays with these names."""
  query, *_ = arrays.tokens
  _, *others = array_of_pairs.groups(problem, names)
  first = [name for name in names if name not in itertools.chain(*others)]
  kernel = _of_gradients(problem, "query", arrays, rows, first)
  made = _run(problem, kernel, first)
  for group in others:
    more = _run(
      problem, _of_gradients(problem, "query", arrays, rows, group), group
    )
    made |= {name: more[name] for name in group}
  of_tokens = [_tokens_last(made["tokens"], kernel.outputs["tokens"])]
  sums = _sums_of_rows(problem, made, outputs.numbers(problem, "query", names))
  if "weight" in names and not problem.term.is_projection:
    sums["weight"] = _sum_of_weights(problem, made["weight"])
  for name in array_of_pairs.names_of(problem, names):
    operand = problem.differentiable[name]
    sums[name] = array_of_pairs.total(made[name], operand)
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
    kernel = _of_gradients(problem, "key", arrays, for_keys, names)
    made = _run(problem, kernel, names)
    sums |= _sums_of_rows(problem, made, outputs.numbers(problem, "key", names))
    own_parts += _parts(problem, "key", made)
    if of_keys:
      of_tokens += [
        _tokens_last(made[name], kernel.outputs[name])
        for name in ("tokens", "value")
      ]
  sums |= parts.sums(problem, own_parts)
  return of_tokens, [sums[name] for name in names]


def _run(
  problem: Any, kernel: Kernel, names: Sequence[str]
) -> dict[str, jax.Array]:
  """The outputs of a kernel of gradients, by name."""
  wanted = outputs.numbers(problem, kernel.own, names)
  compute = functools.partial(gradient.gradients, wanted=wanted)
  return launch(problem, kernel, compute)


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
    inputs.of_gradients(problem, own, operands, arrays.tokens, rows),
    written | of_sums,
    own=own,
    of_gradients=True,
    blocks=blocks,
    entries=entries,
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
  is_finite = jnp.all(jnp.isfinite(tokens), axis=-1)
  return jnp.where(is_finite[..., None], tokens, jnp.nan)


def _tokens_last(gradient: jax.Array, output: Output) -> jax.Array:
  """A gradient as [..., T, D]."""
  if output.axes is Axes.SUMS:
    return gradient[0] if len(gradient) == 1 else jnp.sum(gradient, axis=0)
  is_channels = output.axes is Axes.CHANNELS
  return jnp.moveaxis(gradient, 0, -1) if is_channels else gradient
