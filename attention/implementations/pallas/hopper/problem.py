"""Calls of the kernels, with the arrays that these read and write."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.channels import (
  ChannelSum,
  FunctionSum,
)
from attention.implementations.pallas.hopper.forward import online_softmax
from attention.implementations.pallas.hopper.gradient import gradients
from attention.implementations.pallas.hopper.gradient_rows import (
  MASKED_ROWS,
  ROWS,
)
from attention.implementations.pallas.hopper.launch import launch
from attention.implementations.pallas.hopper.own_tokens import add_matrices
from attention.implementations.pallas.hopper.pairs import (
  PairFunction,
  number_dtype,
)
from attention.implementations.pallas.hopper.tiles import (
  SIDE,
  Axes,
  Input,
  Output,
)
from attention.implementations.pallas.hopper.token_maps import TokenMap
from attention.implementations.pallas.operands import Kind, Operand
from attention.softmax import Statistics

# The blocks of a kernel that sums the gradient of a matrix: each one has a part
# of the sum in the device's memory. A GPU computes about 132 at once.
_MATRIX_BLOCKS = 1024
# A warpgroup copies multiples of so many float32 numbers.
_COPIED = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """What the kernels need besides arrays."""

  leading: tuple[int, ...]
  tiles: np.ndarray  # visibility, int8 [T / 64, S / 64]
  channels: ChannelSum | None  # None for dot products
  factor: float  # of a dot product
  changed: PairFunction | None  # what wrappers do to the products or sums
  bias: PairFunction | None
  visible: PairFunction | None
  maps: Mapping[str, TokenMap]  # of own tokens, in the kernels
  map_key: Callable[[jax.Array], jax.Array]  # by XLA, if a kernel maps own keys
  has_gradients: bool
  weight: Operand | None  # of the channels of an additive score
  # Whether keys may be hidden. NaN in a hidden token then changes nothing, and
  # the rows that attend to NaN become NaN, without derivatives.
  is_masked: bool
  interpret: Any
  dtype: ClassVar[Any] = jnp.float32

  @property
  def differentiable(self) -> dict[str, Operand]:
    """The arrays whose gradients the kernels compute, by names of inputs."""
    operands = self._weights
    if self.changed is not None:
      operands |= dict(zip(self.changed.names, self.changed.operands))
    of_maps = self._arrays_of_maps
    return {
      name: each
      for name, each in (operands | of_maps).items()
      if name in ("weight", *of_maps) or each.kind is Kind.SCALAR
    }

  @property
  def score_operands(self) -> list[Operand]:
    """The arrays whose gradients the kernels compute."""
    return [*self.differentiable.values()]

  @property
  def operands(self) -> dict[str, Operand]:
    """The arrays besides tokens, by the names of inputs."""
    functions = self.changed, self.bias, self.visible
    operands = self._weights | {
      name: each
      for function in functions
      if function is not None
      for name, each in zip(function.names, function.operands)
    }
    if isinstance(self.channels, FunctionSum):
      operands |= self.channels.constants
    return operands | self._arrays_of_maps

  @property
  def _weights(self) -> dict[str, Operand]:
    return {} if self.weight is None else {"weight": self.weight}

  @property
  def _arrays_of_maps(self) -> dict[str, Operand]:
    maps = self.maps.values()
    return {name: each for own in maps for name, each in own.operands.items()}

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of all operands."""
    return [each.array for each in self.operands.values()]

  @property
  def padded_lengths(self) -> tuple[int, int]:
    """T and S, rounded up to tiles."""
    rows, columns = self.tiles.shape
    return rows * SIDE, columns * SIDE

  def cast(self, array: jax.Array, layout: Any) -> jax.Array:
    """An array in a layout of registers; the interpreter has none."""
    return array if self.interpret else plgpu.layout_cast(array, layout)

  def forward(
    self, operands: Sequence[jax.Array], query, key, value
  ) -> tuple[jax.Array, Statistics]:
    """The context, in the value's dtype, and the statistics."""
    lengths = (*self.leading, query.shape[-2])
    rows = Output(jax.ShapeDtypeStruct(lengths, jnp.float32), Axes.ROWS)
    of_context = jax.ShapeDtypeStruct((*lengths, value.shape[-1]), value.dtype)
    outputs = {
      "context": Output(of_context, Axes.TOKENS),
      "maximum": rows,
      "total": rows,
    }
    is_function = isinstance(self.channels, FunctionSum)
    if is_function and self._axes_of(query, key) is Axes.CHANNELS:
      query, key = self._with_nan_tokens(query), self._with_nan_tokens(key)
    inputs = self._inputs(
      "query", operands, query, self._mapped_key(key), value
    )
    results = launch(self, online_softmax, self.tiles, inputs, outputs)
    context, maximum, total = results.values()
    return context, Statistics(maximum, total)

  def gradient_of_queries(
    self, operands, tokens, rows, wanted: Sequence[int]
  ) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
    """The gradients of queries and of wanted operands, and rows for keys."""
    query, key, value = tokens
    of_tokens = self._gradient(query, self._axes_of(query, key))
    names = [[*self.differentiable][number] for number in wanted]
    for_keys = self._outputs_for_keys(query)
    outputs = {"tokens": of_tokens}
    if self.weight is not None:
      outputs["weight"] = of_tokens
    outputs |= {
      name: self._parts(self.differentiable[name])
      for name in names
      if name != "weight"
    }
    visited = query, self._mapped_key(key), value
    numbers = [n for n in names if outputs[n].axes is Axes.NUMBERS]
    results = launch(
      self,
      functools.partial(gradients, wanted=numbers),
      self.tiles,
      self._gradient_inputs("query", operands, visited, rows),
      outputs | for_keys,
      of_gradients=True,
      finish=add_matrices,
    )
    # A gradient has a part for each block, a channel's for each query.
    axes = {name: outputs[name].axes for name in names}
    sums = {
      name: jnp.sum(results[name], axis=-3 if own is Axes.MATRIX else -1)
      for name, own in axes.items()
    }
    if "weight" in sums:
      sums["weight"] = jnp.moveaxis(sums["weight"], 0, -1)
    made = {name: results[name] for name in for_keys}
    return (
      _tokens_last(results["tokens"], of_tokens),
      [*sums.values()],
      made | {"cotangent": rows["cotangent"]},
    )

  def _parts(self, operand: Operand) -> Output:
    """The parts of the gradient of a number or a matrix."""
    rows, entries = len(self.tiles), math.prod(self.leading)
    if operand.kind is Kind.SCALAR:
      shape = jax.ShapeDtypeStruct((*self.leading, rows), self.dtype)
      return Output(shape, Axes.NUMBERS)
    parts = min(rows, -(-_MATRIX_BLOCKS // entries))
    sizes = (*self.leading, parts, *operand.core)
    return Output(jax.ShapeDtypeStruct(sizes, self.dtype), Axes.MATRIX)

  def _outputs_for_keys(self, query: jax.Array) -> dict[str, Output]:
    """What the kernel of queries writes for the kernel of keys."""
    lengths = (*self.leading, query.shape[-2])
    of_rows = Output(jax.ShapeDtypeStruct(lengths, self.dtype), Axes.ROWS)
    outputs = dict.fromkeys(MASKED_ROWS if self.is_masked else ROWS, of_rows)
    if "query" in self.maps:
      mapped = jax.ShapeDtypeStruct((*lengths, query.shape[-1]), query.dtype)
      outputs["mapped"] = Output(mapped, Axes.MAPPED)
    return outputs

  def gradient_of_keys(
    self, operands, tokens, rows
  ) -> tuple[jax.Array, jax.Array]:
    """The gradients of the keys and the values."""
    query, key, value = tokens
    rows = {**rows}
    query = rows.pop("mapped", query)
    shape = (*self.leading, *value.shape[-2:])
    values = jax.ShapeDtypeStruct(shape, self._sum_dtype(value))
    of_tokens = self._gradient(key, self._axes_of(query, key))
    of_key, of_value = launch(
      self,
      gradients,
      self.tiles.T,
      self._gradient_inputs("key", operands, (query, key, value), rows),
      {
        "tokens": of_tokens,
        "value": Output(values, Axes.TOKENS),
      },
      are_keys_own=True,
      of_gradients=True,
    ).values()
    return _tokens_last(of_key, of_tokens), of_value

  def _mapped_key(self, key: jax.Array) -> jax.Array:
    """The keys that blocks of queries visit."""
    return self.map_key(key) if "key" in self.maps else key

  def _inputs(self, own: str, operands, query, key, value) -> dict[str, Input]:
    """The arrays that every kernel reads, of own queries or keys."""
    axes = self._axes_of(query, key)
    query, key = (self._as_read(each, axes, value) for each in (query, key))
    inputs = {
      "query": Input(query, axes, of_keys=False),
      "key": Input(key, axes, of_keys=True),
      "value": Input(value, Axes.TOKENS, of_keys=True),
    }
    if own in self.maps:
      inputs["unmapped"] = inputs.pop(own)
    of_others = [
      name
      for visited, each in self.maps.items()
      if visited != own
      for name in each.operands
    ]
    for (name, operand), array in zip(self.operands.items(), operands):
      if name not in of_others:
        inputs[name] = self._operand_input(operand, array)
    return inputs

  def _gradient_inputs(self, own, operands, tokens, rows) -> dict[str, Input]:
    """The arrays that the kernels of gradients read."""
    inputs = self._inputs(own, operands, *tokens)
    for name, each in rows.items():
      axes = Axes.ROWS if each.ndim == len(self.leading) + 1 else Axes.TOKENS
      inputs[name] = Input(each, axes, of_keys=False)
    return inputs

  def _operand_input(self, operand: Operand, array: jax.Array) -> Input:
    """An array with all leading axes, or the same one for all."""
    sizes = [1] * len(self.leading)
    for axis, size in zip(operand.axes, array.shape):
      if axis is not None:
        sizes[axis] = size
    if len(operand.core) == 2:
      return Input(array.reshape(*sizes, *operand.core), Axes.MATRIX)
    array = array.astype(number_dtype(array))
    if operand.kind is Kind.WHOLE:
      array = array.reshape(*sizes, *operand.core)
      return Input(_padded(array), Axes.WHOLE)
    if operand.kind is Kind.SCALAR:
      return Input(array.reshape(*sizes, 1), Axes.NUMBERS)
    of_keys = operand.kind is Kind.ROW
    array = array.reshape(*sizes, -1)
    missing = self.padded_lengths[of_keys] - array.shape[-1]
    array = jnp.pad(array, [(0, 0)] * len(sizes) + [(0, missing)])
    return Input(array, Axes.ROWS, of_keys)

  def _axes_of(self, query, key) -> Axes:
    """How kernels read mapped queries and keys."""
    if not self.channels:
      return Axes.TOKENS
    is_staged = (
      isinstance(self.channels, FunctionSum)
      and query.dtype == key.dtype
      and query.dtype.itemsize == 2
      and query.shape[-1] % SIDE == 0
    )
    # A channel of a tile is contiguous; XLA's products write mapped tokens so.
    return Axes.STAGED if is_staged else Axes.CHANNELS

  def _with_nan_tokens(self, tokens: jax.Array) -> jax.Array:
    """Tokens of NaN for those with NaN or infinity, if keys may be hidden."""
    # A function of the user may make a number of a feature that is NaN.
    if not self.is_masked:
      return tokens
    return jnp.where(_is_bad(tokens)[..., None], jnp.nan, tokens)

  def _as_read(self, tokens: jax.Array, axes: Axes, value) -> jax.Array:
    """Mapped queries or keys as kernels read them."""
    if axes is Axes.CHANNELS:
      return jnp.moveaxis(tokens, -1, 0).astype(jnp.float32)
    return tokens if axes is Axes.STAGED else tokens.astype(value.dtype)

  def _gradient(self, tokens, axes: Axes) -> Output:
    """What a kernel returns for the gradient of mapped tokens."""
    length, size = tokens.shape[-2:]
    dtype = self._sum_dtype(tokens)
    if axes is Axes.CHANNELS or (axes is Axes.STAGED and dtype == self.dtype):
      shape = (size, *self.leading, length)
      return Output(jax.ShapeDtypeStruct(shape, self.dtype), Axes.CHANNELS)
    shape = (*self.leading, length, size)
    return Output(jax.ShapeDtypeStruct(shape, dtype), axes)

  def _sum_dtype(self, tokens) -> Any:
    """That of sums if a gradient is summed over leading axes."""
    return tokens.dtype if tokens.shape[:-2] == self.leading else self.dtype


def _padded(numbers: jax.Array) -> jax.Array:
  """Numbers [..., n] with zeros up to what a warpgroup copies."""
  widths = [(0, 0)] * (numbers.ndim - 1)
  return jnp.pad(numbers, [*widths, (0, -numbers.shape[-1] % _COPIED)])


def _tokens_last(gradient: jax.Array, output: Output) -> jax.Array:
  """A gradient as [..., T, D]."""
  is_channels = output.axes is Axes.CHANNELS
  return jnp.moveaxis(gradient, 0, -1) if is_channels else gradient


def _is_bad(tokens: jax.Array) -> jax.Array:
  """Which tokens [..., D] have NaN or infinity."""
  return ~jnp.all(jnp.isfinite(tokens), axis=-1)
