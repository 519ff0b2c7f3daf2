"""Functions of the user as sums over features, in the kernels for Hopper GPUs.

In f(sum_c g(q_c, k_c)) both functions are found in the traced operations, by
what the axes of arrays belong to.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from attention.implementations.pallas.functions import (
  without_constants,
  without_unused,
)
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.scores.channels import (
  ChannelSum,
  add_to_sum,
  for_each_channel,
  vectors,
)
from attention.implementations.pallas.hopper.tiles.layout import SIDE, TILE
from attention.implementations.pallas.hopper.traced.functions import (
  gradient_of,
  inlined,
)
from attention.implementations.pallas.hopper.traced.pairs import evaluate
from attention.implementations.pallas.hopper.traced.token_axes import (
  FEATURE,
  KEY,
  QUERY,
  SHAPES,
  Owners,
  axes_of,
)
from attention.implementations.pallas.operands import Kind, Operand, Unsupported
from attention.scores import Score


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionSum(ChannelSum):
  """g of a traced function, and f as `finish`."""

  jaxpr: Jaxpr  # of (query, key, *constants), up to the sum
  axes: dict[Any, Owners]  # of its variables
  constants: dict[str, Operand]  # numbers, or one for each feature
  finish: Callable[[jax.Array], jax.Array]
  features: int

  def sums(self, block: Block) -> jax.Array:
    def add(channel, sums):
      arguments = self._arguments(block, channel)
      return sums + self._term(block.are_keys_own, *arguments)

    return for_each_channel(
      block, self.features, add, block.problem.zeros(TILE)
    )

  def add_gradients(self, block: Block, of_sums: jax.Array) -> None:
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
      is_row = len(owner) == 1 and (owner == (KEY,)) == are_keys_own
      return jax.lax.broadcast_in_dim(
        value, shape, () if not owner else (0 if is_row else 1,)
      )

    for equation in self.jaxpr.eqns:
      (variable,), atoms = equation.outvars, equation.invars
      owner = _owner(self.axes[variable])
      if equation.primitive.name in SHAPES:
        known[variable] = spread(atoms[0], owner)
      else:
        inputs = [spread(atom, owner) for atom in atoms]
        known[variable] = equation.primitive.bind(*inputs, **equation.params)
    # Two results if the sum is a product of matrices.
    factors = [spread(each, (QUERY, KEY)) for each in self.jaxpr.outvars]
    return functools.reduce(jax.lax.mul, factors)


def _owner(axes: Owners) -> tuple[str, ...]:
  return tuple(name for name in (QUERY, KEY) if name in axes)


def of_function(score: Score, features: int) -> FunctionSum:
  """The sum of a score of matrices; raises `Unsupported` for others."""
  jaxpr, arrays = _traced(score, features)
  owners: list[Owners] = [(QUERY, FEATURE), (KEY, FEATURE)]
  owners += [
    (None,) * each.ndim if each.size == 1 else (FEATURE,) for each in arrays
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


def _traced(score: Score, features: int) -> tuple[Jaxpr, list[jax.Array]]:
  """The operations of (query, key, *arrays), and the captured arrays."""
  tokens = [jax.ShapeDtypeStruct((SIDE, features), jnp.float32)] * 2
  try:
    closed = inlined(score.pair, *tokens, is_differentiated=True)
  except (AssertionError, RuntimeError, TypeError, ValueError) as error:
    if isinstance(error, Unsupported):
      raise
    raise Unsupported(
      "needs a score that is a function of matrices [t, D] and [s, D]"
    ) from error
  arrays = [jnp.asarray(each) for each in closed.consts]
  shapes = [each.shape for each in arrays]
  if any(each.size != 1 and each.shape != (features,) for each in arrays):
    raise Unsupported(
      f"supports captured numbers and arrays [D] = [{features}], got {shapes}"
    )
  return without_constants(closed), arrays


def _find_sum(jaxpr: Jaxpr, axes: dict[Any, Owners]) -> int:
  """The place of the sum over the features of pairs; completes `axes`."""
  for place, equation in enumerate(jaxpr.eqns):
    inputs = [
      (None,) * jnp.ndim(each.val) if isinstance(each, Literal) else axes[each]
      for each in equation.invars
    ]
    result = axes_of(equation, inputs)
    axes[equation.outvars[0]] = result
    is_sum = equation.primitive.name in ("reduce_sum", "dot_general")
    if is_sum and FEATURE in inputs[0]:
      if result != (QUERY, KEY):
        raise Unsupported("supports scores with one sum over the features")
      return place
  raise Unsupported("needs a score that is a sum over the features")
