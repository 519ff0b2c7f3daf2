"""Scores of Hopper kernels that are sums over the features of tokens.

Such a score is f(sum_c g(q_c, k_c)), for instance an additive score or the
negative distance of two tokens. Kernels add g for one feature, or channel,
after the other. In a function of the user g and f are found by the axes of its
traced operations.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from attention.implementations.pallas.functions import (
  OPERATIONS,
  without_constants,
  without_unused,
)
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  BY_ROW,
  SIDE,
  TILE,
  WGMMA,
  across,
  down,
)
from attention.implementations.pallas.hopper.traced.functions import (
  gradient_of,
  inlined,
)
from attention.implementations.pallas.hopper.traced.pairs import evaluate
from attention.implementations.pallas.operands import Kind, Operand, Unsupported
from attention.scores import Score

# What each axis of an array belongs to; None for an axis of size 1.
Owners = tuple[str | None, ...]
_QUERY, _KEY, _FEATURE = "query", "key", "feature"
_SHAPES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
_REDUCTIONS = frozenset(
  ["dot_general", "reduce_max", "reduce_min", "reduce_sum"]
)
_PARTS = frozenset(["concatenate", "iota", "slice", "split"])
_ELEMENTWISE = OPERATIONS - _SHAPES - _REDUCTIONS - _PARTS


class ChannelSum:
  """The sum of a score over the channels of a tile, and its gradients."""

  def scratch(self) -> Any:
    """Shared memory of a block, besides its tiles."""
    return ()

  def prepare(self, block: Block, *, of_own: bool) -> None:
    """Called when a tile of own or other tokens is loaded or changed."""

  def sums(self, block: Block) -> jax.Array:
    """The sums of all pairs of a tile."""
    raise NotImplementedError

  def sums_of_pairs(self, block: Block, channel: Any) -> jax.Array:
    """The sums q_c + k_c of all pairs of a tile."""
    own, other = vectors(block, *block.own_and_other, channel)
    return across(own, TILE) + down(other, TILE)

  def add_gradients(self, block: Block, of_sums: jax.Array) -> None:
    """Adds to the gradients of channels."""
    raise NotImplementedError


def zeros(block: Block) -> jax.Array:
  """A tile of sums before the first channel."""
  return block.problem.cast(jnp.zeros(TILE, jnp.float32), WGMMA)


def for_each_channel(
  block: Block, channels: int, body: Callable, state: Any, *, most: int = 4
) -> Any:
  """The state after body(channel, state), with several in an iteration."""
  # With a mask or a bias, the kernel of keys has too few registers for as many.
  problem = block.problem
  has_more = problem.is_masked or problem.bias is not None
  is_scarce = block.are_keys_own and has_more
  count = most // 2 if is_scarce else most
  count = count if channels % count == 0 else 1

  def several(number, state):
    for offset in range(count):
      state = body(number * count + offset, state)
    return state

  return jax.lax.fori_loop(0, channels // count, several, state)


def add_to_sum(block: Block, name: str, channel: Any, part) -> None:
  """Adds to one channel of the gradients of own tokens, or of a weight."""
  result = block.channel_sums[name]
  before = block.problem.cast(result[channel], BY_ROW)
  result[channel] = before + part


def vectors(
  block: Block, own: Any, other: Any, channel: Any
) -> tuple[jax.Array, jax.Array]:
  """A feature of own tokens and of other tokens."""
  cast = block.problem.cast  # to be called at once on what is read
  return cast(own[channel], BY_ROW), cast(other[channel], BY_COLUMN)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionSum(ChannelSum):
  """g of a traced function, and f as `finish`."""

  jaxpr: Jaxpr  # of (query, key, *constants), up to the sum
  axes: dict[Any, Owners]  # of its variables
  constants: dict[str, Operand]  # numbers, or one for each feature
  finish: Callable[[jax.Array], jax.Array]
  features: int

  def sums(self, block: Block) -> jax.Array:
    """See `ChannelSum`."""

    def add(channel, sums):
      arguments = self._arguments(block, channel)
      return sums + self._term(block.are_keys_own, *arguments)

    return for_each_channel(block, self.features, add, zeros(block))

  def add_gradients(self, block: Block, of_sums: jax.Array) -> None:
    """See `ChannelSum`."""

    def term(*arguments):
      return self._term(block.are_keys_own, *arguments)

    def add(channel, state):
      arguments = self._arguments(block, channel)
      part = gradient_of(term, arguments, of_sums)
      add_to_sum(block, "tokens", channel, part)
      return state

    for_each_channel(block, self.features, add, None)

  def _arguments(self, block: Block, channel: Any) -> list[Any]:
    numbers = [
      block.tiles[name][0 if each.array.size == 1 else channel]
      for name, each in self.constants.items()
    ]
    return [*vectors(block, *block.own_and_other, channel), *numbers]

  def _term(self, are_keys_own: bool, own, other, *numbers) -> jax.Array:
    """The term of a tile, computed per token as long as possible."""
    tokens = (other, own) if are_keys_own else (own, other)
    known = dict(zip(self.jaxpr.invars, (*tokens, *numbers)))

    def spread(atom, to):
      value = atom.val if isinstance(atom, Literal) else known[atom]
      owner = () if isinstance(atom, Literal) else _owner(self.axes[atom])
      shape = {0: (), 1: (SIDE,), 2: TILE}[len(to)]
      if jnp.ndim(value) == len(to):
        return value
      is_row = len(owner) == 1 and (owner == (_KEY,)) == are_keys_own
      return jax.lax.broadcast_in_dim(
        value, shape, () if not owner else (0 if is_row else 1,)
      )

    for equation in self.jaxpr.eqns:
      (variable,), atoms = equation.outvars, equation.invars
      owner = _owner(self.axes[variable])
      if equation.primitive.name in _SHAPES:
        known[variable] = spread(atoms[0], owner)
      else:
        inputs = [spread(atom, owner) for atom in atoms]
        known[variable] = equation.primitive.bind(*inputs, **equation.params)
    # Two results if the sum is a product of matrices.
    factors = [spread(each, (_QUERY, _KEY)) for each in self.jaxpr.outvars]
    return functools.reduce(jax.lax.mul, factors)


def _owner(axes: Owners) -> tuple[str, ...]:
  return tuple(name for name in (_QUERY, _KEY) if name in axes)


def of_function(score: Score, features: int) -> FunctionSum:
  """The sum of a score of matrices; raises `Unsupported` for others."""
  tokens = [jax.ShapeDtypeStruct((SIDE, features), jnp.float32)] * 2
  try:
    closed = inlined(score.pair, *tokens)
  except (AssertionError, RuntimeError, TypeError, ValueError) as error:
    raise Unsupported(
      "needs a score that is a function of matrices [t, D] and [s, D]"
    ) from error
  arrays = [jnp.asarray(each) for each in closed.consts]
  shapes = [each.shape for each in arrays]
  if any(each.size != 1 and each.shape != (features,) for each in arrays):
    raise Unsupported(
      f"supports captured numbers and arrays [D] = [{features}], got {shapes}"
    )
  jaxpr = without_constants(closed)
  owners: list[Owners] = [(_QUERY, _FEATURE), (_KEY, _FEATURE)]
  owners += [
    (None,) * each.ndim if each.size == 1 else (_FEATURE,) for each in arrays
  ]
  axes: dict[Any, Owners] = dict(zip(jaxpr.invars, owners))
  place = _find_sum(jaxpr, axes)
  eqns, summed = jaxpr.eqns, jaxpr.eqns[place]
  term, used = without_unused(
    jaxpr.replace(eqns=eqns[:place], outvars=summed.invars), keep=2
  )
  rest, others = without_unused(
    jaxpr.replace(
      eqns=[*eqns[:place], *eqns[place + 1 :]],
      invars=[*summed.outvars, *jaxpr.invars],
    ),
    keep=1,
  )
  numbers = [each for each, own in zip(arrays, others[3:]) if own]
  if any(others[1:3]) or any(each.size != 1 for each in numbers):
    raise Unsupported("supports scores with one sum over the features")
  constants = {
    f"channel {number}": Operand(each.reshape(-1), Kind.WHOLE, ())
    for number, (each, own) in enumerate(zip(arrays, used[2:]))
    if own
  }

  def finish(sums):
    return evaluate(rest, [sums, *numbers])[0]

  return FunctionSum(term, axes, constants, finish, features)


def _find_sum(jaxpr: Jaxpr, axes: dict[Any, Owners]) -> int:
  """The place of the sum over the features of pairs; completes `axes`."""
  for place, equation in enumerate(jaxpr.eqns):
    inputs = [
      (None,) * jnp.ndim(each.val) if isinstance(each, Literal) else axes[each]
      for each in equation.invars
    ]
    result = _axes_of(equation, inputs)
    axes[equation.outvars[0]] = result
    is_sum = equation.primitive.name in ("reduce_sum", "dot_general")
    if is_sum and _FEATURE in inputs[0]:
      if result != (_QUERY, _KEY):
        raise Unsupported("supports scores with one sum over the features")
      return place
  raise Unsupported("needs a score that is a sum over the features")


def _axes_of(equation: Any, inputs: Sequence[Owners]) -> Owners:
  """What the axes of an operation's result belong to."""
  name, parameters = equation.primitive.name, equation.params
  variable = equation.outvars[0].aval
  if name in _ELEMENTWISE:
    merged: list[str | None] = [None] * len(variable.shape)
    for each in inputs:
      for number, owner in enumerate(each):
        if owner is not None and merged[number] not in (None, owner):
          raise Unsupported("supports no other pairs than queries and keys")
        merged[number] = owner or merged[number]
    return tuple(merged)
  if name == "dot_general":
    contracted, batch = parameters["dimension_numbers"]
    places = [axes[0] for axes in contracted if len(axes) == 1]
    summed = [each[place] for each, place in zip(inputs, places)]
    if any(batch) or summed != [_FEATURE] * 2:
      raise Unsupported("supports products of queries and keys only")
    return tuple(
      owner
      for place, each in zip(places, inputs)
      for axis, owner in enumerate(each)
      if axis != place
    )
  if name not in _SHAPES and name != "reduce_sum":
    raise Unsupported(
      f"does not support the operation {name} in a score that is no dot product"
    )
  (source,) = inputs
  shape = equation.invars[0].aval.shape
  if name == "broadcast_in_dim":
    merged = [None] * len(variable.shape)
    for number, axis in enumerate(parameters["broadcast_dimensions"]):
      if shape[number] == variable.shape[axis]:
        merged[axis] = source[number]
    return tuple(merged)
  if name == "transpose":
    return tuple(source[axis] for axis in parameters["permutation"])
  kept = [owner for owner, size in zip(source, shape) if size > 1]
  sizes = [size for size in variable.shape if size > 1]
  if name in ("reshape", "squeeze") and sizes == [n for n in shape if n > 1]:
    owners = iter(kept)
    return tuple(next(owners) if n > 1 else None for n in variable.shape)
  if name == "reduce_sum":
    removed = parameters["axes"]
    return tuple(
      owner for axis, owner in enumerate(source) if axis not in removed
    )
  raise Unsupported("supports scores with one sum over the features")
