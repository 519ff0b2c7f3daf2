"""Calls of the kernels, with the arrays that these read and write."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper import inputs, parts
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
from attention.implementations.pallas.hopper.pairs import PairFunction
from attention.implementations.pallas.hopper.parts import Parts, Slice
from attention.implementations.pallas.hopper.projections import Projections
from attention.implementations.pallas.hopper.tiles import (
  SIDE,
  Axes,
  Output,
)
from attention.implementations.pallas.hopper.token_maps import TokenMap
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  summed,
)
from attention.softmax import Statistics


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
  projections: Projections | None  # of all tokens, in a kernel before
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
    changed: dict[str, Operand] = {}
    if self.changed is not None:
      changed = dict(zip(self.changed.names, self.changed.operands))
    numbers = {n: each for n, each in changed.items() if _is_number(each)}
    return self._weights | numbers | self._arrays_of_maps

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
    maps: list[Any] = [*self.maps.values()]
    maps += [] if self.projections is None else [self.projections]
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
    self, operands: Sequence[jax.Array], tokens: Sequence[jax.Array]
  ) -> tuple[jax.Array, Statistics, dict[str, jax.Array]]:
    """The context, the statistics, and projected tokens by name."""
    query, key, value = tokens
    lengths = (*self.leading, query.shape[-2])
    rows = Output(jax.ShapeDtypeStruct(lengths, jnp.float32), Axes.ROWS)
    of_context = jax.ShapeDtypeStruct((*lengths, value.shape[-1]), value.dtype)
    outputs = {
      "context": Output(of_context, Axes.TOKENS),
      "maximum": rows,
      "total": rows,
    }
    is_function = isinstance(self.channels, FunctionSum)
    if is_function and inputs.token_axes(self, query, key) is Axes.CHANNELS:
      query, key = self._with_nan_tokens(query), self._with_nan_tokens(key)
    projected = inputs.projected_tokens(self, operands, query, key)
    tokens = query, self._mapped_key(key), value
    read = inputs.of_forward(self, operands, tokens, projected)
    results = launch(self, online_softmax, self.tiles, read, outputs)
    context, maximum, total = results.values()
    return context, Statistics(maximum, total), projected

  def gradients(
    self,
    operands,
    tokens,
    projected,
    rows,
    wanted: Sequence[int],
    *,
    of_keys: bool,
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients of tokens, and of the wanted operands of the score.

    Without `of_keys` the first are those of the queries only.
    """
    names = [[*self.differentiable][number] for number in wanted]
    query, key, _ = tokens
    of_query = self._gradient(query, inputs.token_axes(self, query, key))
    made = self._of_queries(operands, tokens, projected, rows, names, of_query)
    of_tokens = [_tokens_last(made["tokens"], of_query)]
    sums, made_parts = (
      self._sums_of_rows(made, names),
      self._parts("query", made),
    )
    # The kernel of keys reads rows that the other completes, which runs in any
    # case.
    if of_keys or not {*names}.isdisjoint(self._slices("key")):
      for_keys = {n: made[n] for n in self._outputs_for_keys(query)}
      for_keys["cotangent"] = rows["cotangent"]
      of_key = self._gradient(key, inputs.token_axes(self, query, key))
      made = self._of_keys(operands, tokens, projected, for_keys, names, of_key)
      made_parts += self._parts("key", made)
      if of_keys:
        of_tokens += [_tokens_last(made["tokens"], of_key), made["value"]]
    sums |= parts.sums(self, made_parts)
    return of_tokens, [sums[name] for name in names]

  def _of_queries(
    self, operands, tokens, projected, rows, names, of_tokens: Output
  ):
    """The results of the kernel of queries, by name."""
    query, key, value = tokens
    outputs = {"tokens": of_tokens}
    if "weight" in names and self.projections is None:
      outputs["weight"] = of_tokens
    numbers = [name for name in names if _is_number(self.differentiable[name])]
    shape = jax.ShapeDtypeStruct((*self.leading, len(self.tiles)), self.dtype)
    outputs |= dict.fromkeys(numbers, Output(shape, Axes.NUMBERS))
    own_parts, blocks = self._part_outputs("query", names)
    return launch(
      self,
      functools.partial(gradients, wanted=numbers),
      self.tiles,
      inputs.of_gradients(
        self,
        "query",
        operands,
        (query, self._mapped_key(key), value),
        projected,
        rows,
      ),
      outputs | own_parts | self._outputs_for_keys(query),
      of_gradients=True,
      blocks=blocks,
    )

  def _of_keys(
    self, operands, tokens, projected, rows, names, of_tokens: Output
  ):
    """The results of the kernel of keys, by name."""
    query, key, value = tokens
    rows = {**rows}
    query = rows.pop("mapped", query)
    shape = (*self.leading, *value.shape[-2:])
    values = jax.ShapeDtypeStruct(shape, self._sum_dtype(value))
    outputs = {"tokens": of_tokens, "value": Output(values, Axes.TOKENS)}
    own_parts, blocks = self._part_outputs("key", names)
    return launch(
      self,
      gradients,
      self.tiles.T,
      inputs.of_gradients(
        self, "key", operands, (query, key, value), projected, rows
      ),
      outputs | own_parts,
      are_keys_own=True,
      of_gradients=True,
      blocks=blocks,
    )

  def _outputs_for_keys(self, query: jax.Array) -> dict[str, Output]:
    """What the kernel of queries writes for the kernel of keys."""
    lengths = (*self.leading, query.shape[-2])
    of_rows = Output(jax.ShapeDtypeStruct(lengths, self.dtype), Axes.ROWS)
    outputs = dict.fromkeys(MASKED_ROWS if self.is_masked else ROWS, of_rows)
    if "query" in self.maps:
      mapped = jax.ShapeDtypeStruct((*lengths, query.shape[-1]), query.dtype)
      outputs["mapped"] = Output(mapped, Axes.MAPPED)
    return outputs

  def _slices(self, own: str) -> dict[str, Slice]:
    """What the kernel of own tokens can add to gradients of arrays."""
    if self.projections is not None:
      return self.projections.slices(own)
    own_map = self.maps.get(own)
    matrices = {} if own_map is None else own_map.matrices
    return {name: Slice(each.core, 0) for name, each in matrices.items()}

  def _part_outputs(
    self, own: str, names: Sequence[str]
  ) -> tuple[dict[str, Output], int | None]:
    """The parts of wanted arrays, and the blocks for each leading entry."""
    slices = {n: x for n, x in self._slices(own).items() if n in names}
    if not slices:
      return {}, None
    blocks = self._num_blocks(own)
    return {
      name: parts.output(self.leading, self.operands[name], each.core, blocks)
      for name, each in slices.items()
    }, blocks

  def _num_blocks(self, own: str) -> int:
    return parts.num_blocks(
      self.leading, self.tiles.shape[1 if own == "key" else 0]
    )

  def _parts(self, own: str, made: Mapping[str, jax.Array]) -> list[Parts]:
    """The parts of gradients that a kernel has made."""
    return [
      Parts(made[name], self._num_blocks(own), name, each.first)
      for name, each in self._slices(own).items()
      if name in made
    ]

  def _sums_of_rows(self, made, names: Sequence[str]) -> dict[str, jax.Array]:
    """The gradients of which there is a part for each query or tile."""
    sums = {}
    for name in names:
      operand = self.differentiable[name]
      if _is_number(operand):
        sums[name] = summed(jnp.sum(made[name], -1), operand, self.leading)
    if "weight" in names and self.projections is None:
      by_entry = jnp.moveaxis(jnp.sum(made["weight"], -1), 0, -1)
      sums["weight"] = summed(by_entry, self.operands["weight"], self.leading)
    return sums

  def _mapped_key(self, key: jax.Array) -> jax.Array:
    """The keys that blocks of queries visit."""
    return self.map_key(key) if "key" in self.maps else key

  def _with_nan_tokens(self, tokens: jax.Array) -> jax.Array:
    """Tokens of NaN for those with NaN or infinity, if keys may be hidden."""
    # A function of the user may make a number of a feature that is NaN.
    if not self.is_masked:
      return tokens
    is_bad = ~jnp.all(jnp.isfinite(tokens), axis=-1)
    return jnp.where(is_bad[..., None], jnp.nan, tokens)

  def _gradient(self, tokens, axes: Axes) -> Output:
    """What a kernel returns for the gradient of tokens."""
    length, size = tokens.shape[-2:]
    dtype = self._sum_dtype(tokens)
    is_wide = axes is Axes.STAGED and dtype == self.dtype
    if self.projections is not None:
      axes = Axes.TOKENS
    elif axes is Axes.CHANNELS or is_wide:
      shape = (size, *self.leading, length)
      return Output(jax.ShapeDtypeStruct(shape, self.dtype), Axes.CHANNELS)
    shape = (*self.leading, length, size)
    return Output(jax.ShapeDtypeStruct(shape, dtype), axes)

  def _sum_dtype(self, tokens) -> Any:
    """That of sums if a gradient is summed over leading axes."""
    return tokens.dtype if tokens.shape[:-2] == self.leading else self.dtype


def _is_number(operand: Operand) -> bool:
  return operand.kind is Kind.SCALAR


def _tokens_last(gradient: jax.Array, output: Output) -> jax.Array:
  """A gradient as [..., T, D]."""
  is_channels = output.axes is Axes.CHANNELS
  return jnp.moveaxis(gradient, 0, -1) if is_channels else gradient
