"""Calls of the kernels, with the arrays that they write."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.pallas.hopper import gradient, inputs, parts
from attention.implementations.pallas.hopper.channels import FunctionSum
from attention.implementations.pallas.hopper.forward import online_softmax
from attention.implementations.pallas.hopper.gradient_rows import (
  MASKED_ROWS,
  ROWS,
)
from attention.implementations.pallas.hopper.launch import launch
from attention.implementations.pallas.hopper.parts import Parts, Slice
from attention.implementations.pallas.hopper.prediction_arrays import SHARES
from attention.implementations.pallas.hopper.shared_tokens import (
  Entries,
  entries_of,
)
from attention.implementations.pallas.hopper.tiles import Axes, Output
from attention.implementations.pallas.operands import Kind, summed
from attention.softmax import Statistics


def forward(
  problem: Any, operands: Sequence[jax.Array], tokens: Sequence[jax.Array]
) -> tuple[jax.Array, Statistics]:
  """The context and the statistics."""
  query, key, value = tokens
  lengths = (*problem.leading, query.shape[-2])
  rows = Output(jax.ShapeDtypeStruct(lengths, jnp.float32), Axes.ROWS)
  of_context = jax.ShapeDtypeStruct((*lengths, value.shape[-1]), value.dtype)
  outputs = {
    "context": Output(of_context, Axes.TOKENS),
    "maximum": rows,
    "total": rows,
  }
  is_function = isinstance(problem.channels, FunctionSum)
  if is_function and inputs.token_axes(problem, query, key) is Axes.CHANNELS:
    query, key = (
      _with_nan_tokens(problem, query),
      _with_nan_tokens(problem, key),
    )
  tokens = query, key, value
  read = inputs.of_forward(problem, operands, tokens)
  results = launch(problem, online_softmax, problem.tiles, read, outputs)
  context, maximum, total = results.values()
  return context, Statistics(maximum, total)


class Arrays(NamedTuple):
  """The arrays that the kernels of gradients read besides rows."""

  operands: Sequence[jax.Array]
  tokens: Sequence[jax.Array]  # the query, the key and the value


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
  output = _gradient(problem, query, axes)
  made = _of_queries(problem, arrays, rows, names, output)
  of_tokens = [_tokens_last(made["tokens"], output)]
  sums = _sums_of_rows(problem, made, _numbers(problem, "query", names))
  if "weight" in names and problem.projections is None:
    sums["weight"] = _sum_of_weights(problem, made["weight"])
  own_parts = _parts(problem, "query", made)
  # The kernel of keys reads rows that the other completes, which runs in any
  # case.
  by_keys = {*_slices(problem, "key"), *_numbers(problem, "key", names)}
  if of_keys or not by_keys.isdisjoint(names):
    for_keys = {n: made[n] for n in _outputs_for_keys(problem, query)}
    for_keys["cotangent"] = rows["cotangent"]
    entries = _entries(problem, key)
    output = _gradient(problem, key, axes, entries)
    made = _of_keys(problem, arrays, for_keys, names, output)
    sums |= _sums_of_rows(problem, made, _numbers(problem, "key", names))
    own_parts += _parts(problem, "key", made)
    if of_keys:
      of_values = _gradient(problem, value, Axes.TOKENS, entries)
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
  outputs = {"tokens": of_tokens}
  if "weight" in names and problem.projections is None:
    outputs["weight"] = of_tokens
  numbers = _numbers(problem, "query", names)
  outputs |= _number_outputs(problem, numbers)
  own_parts, blocks = _part_outputs(problem, "query", names)
  return launch(
    problem,
    functools.partial(gradient.gradients, wanted=numbers),
    problem.tiles,
    inputs.of_gradients(problem, "query", operands, tokens, rows),
    outputs | own_parts | _outputs_for_keys(problem, tokens[0]),
    of_gradients=True,
    blocks=blocks,
  )


def _of_keys(
  problem: Any, arrays: Arrays, rows, names: Sequence[str], of_tokens: Output
) -> dict[str, jax.Array]:
  """The results of the kernel of keys, by name."""
  operands, tokens = arrays
  _, key, value = tokens
  entries = _entries(problem, key)
  of_values = _gradient(problem, value, Axes.TOKENS, entries)
  outputs = {"tokens": of_tokens, "value": of_values}
  numbers = _numbers(problem, "key", names)
  outputs |= _number_outputs(problem, numbers)
  own_parts, blocks = _part_outputs(problem, "key", names)
  return launch(
    problem,
    functools.partial(gradient.gradients, wanted=numbers),
    problem.tiles.T,
    inputs.of_gradients(problem, "key", operands, tokens, rows),
    outputs | own_parts,
    are_keys_own=True,
    of_gradients=True,
    blocks=blocks,
    entries=entries,
  )


def _outputs_for_keys(problem: Any, query: jax.Array) -> dict[str, Output]:
  """What the kernel of queries writes for the kernel of keys."""
  lengths = (*problem.leading, query.shape[-2])
  of_rows = Output(jax.ShapeDtypeStruct(lengths, problem.dtype), Axes.ROWS)
  names = MASKED_ROWS if problem.is_masked else ROWS
  if "query" in problem.maps and problem.maps["query"].is_scaling:
    names = *names, "query scale"
  if problem.prediction is not None:
    names = *names, SHARES
  if problem.distances is not None:
    names = *names, *problem.distances.ends(of_keys=False)
  return dict.fromkeys(names, of_rows)


def _slices(problem: Any, own: str) -> dict[str, Slice]:
  """What the kernel of own tokens can add to gradients of arrays."""
  slices = _slices_of_score(problem, own)
  if problem.of_bias is not None and own == "query":
    slices = slices | problem.of_bias.slices()
  if problem.prediction is not None and own == "query":
    slices = slices | problem.prediction.slices()
  return slices


def _slices_of_score(problem: Any, own: str) -> dict[str, Slice]:
  if problem.projections is not None:
    return problem.projections.slices(own)
  if problem.distances is not None:
    return problem.distances.slices(own)
  if problem.sinusoids is not None:
    return problem.sinusoids.slices(own)
  own_map = problem.maps.get(own)
  if own_map is None or own_map.of_matrices is None:
    return {}
  return {name: Slice(x.core, 0) for name, x in own_map.matrices.items()}


def _part_outputs(
  problem: Any, own: str, names: Sequence[str]
) -> tuple[dict[str, Output], int | None]:
  """The parts of wanted arrays, and the blocks for each leading entry."""
  slices = {n: x for n, x in _slices(problem, own).items() if n in names}
  if not slices:
    return {}, None
  blocks = _num_blocks(problem, own)
  return {
    name: parts.output(
      problem.leading, problem.operands[name], each.core, blocks
    )
    for name, each in slices.items()
  }, blocks


def _num_blocks(problem: Any, own: str) -> int:
  return parts.num_blocks(
    problem.leading, problem.tiles.shape[1 if own == "key" else 0]
  )


def _parts(
  problem: Any, own: str, made: Mapping[str, jax.Array]
) -> list[Parts]:
  """The parts of gradients that a kernel has made."""
  return [
    Parts(made[name], _num_blocks(problem, own), name, each.first)
    for name, each in _slices(problem, own).items()
    if name in made
  ]


def _numbers(problem: Any, own: str, names: Sequence[str]) -> list[str]:
  """The numbers whose gradients the kernel of own tokens sums over pairs."""
  kinds = {"key": (Kind.ROW,), "query": (Kind.SCALAR, Kind.COLUMN)}[own]
  return [name for name in names if problem.differentiable[name].kind in kinds]


def _number_outputs(problem: Any, names: Sequence[str]) -> dict[str, Output]:
  """The sums over the pairs of own tokens, or of their tiles."""

  def output(kind):
    length, axes = problem.padded_lengths[kind is Kind.ROW], Axes.ROWS
    if kind is Kind.SCALAR:
      length, axes = len(problem.tiles), Axes.NUMBERS
    shape = (*problem.leading, length)
    return Output(jax.ShapeDtypeStruct(shape, problem.dtype), axes)

  return {name: output(problem.differentiable[name].kind) for name in names}


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


def _entries(problem: Any, key: jax.Array) -> Entries:
  """The entries of the leading axes that a block of keys computes."""
  return entries_of(problem.leading, key, problem.tiles.shape[1])


def _gradient(
  problem: Any, tokens, axes: Axes, entries: Entries | None = None
) -> Output:
  """What a kernel returns for the gradient of tokens.

  It adds the entries of a block, if these are all that share the tokens.
  """
  length, size = tokens.shape[-2:]
  dtype = _sum_dtype(problem, tokens)
  is_wide = axes is Axes.STAGED and dtype == problem.dtype
  if axes is Axes.CHANNELS or is_wide:
    shape = (size, *problem.leading, length)
    return Output(jax.ShapeDtypeStruct(shape, problem.dtype), Axes.CHANNELS)
  if entries is not None and _are_shared(problem, tokens, entries):
    shape = (entries.parts, *tokens.shape)
    return Output(jax.ShapeDtypeStruct(shape, problem.dtype), Axes.SUMS)
  shape = (*problem.leading, length, size)
  return Output(jax.ShapeDtypeStruct(shape, dtype), axes)


def _are_shared(problem: Any, tokens: jax.Array, entries: Entries) -> bool:
  """Whether the entries of a block are all that share the same tokens."""
  sizes = enumerate(tokens.shape[:-2])
  shared = [n for n, size in sizes if size < problem.leading[n]]
  return bool(shared) and tuple(shared) == entries.shared


def _sum_dtype(problem: Any, tokens) -> Any:
  """That of sums if a gradient is summed over leading axes."""
  return tokens.dtype if tokens.shape[:-2] == problem.leading else problem.dtype


def _tokens_last(gradient: jax.Array, output: Output) -> jax.Array:
  """A gradient as [..., T, D]."""
  if output.axes is Axes.SUMS:
    return gradient[0] if len(gradient) == 1 else jnp.sum(gradient, axis=0)
  is_channels = output.axes is Axes.CHANNELS
  return jnp.moveaxis(gradient, 0, -1) if is_channels else gradient
