"""Loops over time whose weights get their gradient all at once.

Backwards, `jax.lax.scan` adds to the gradient of a weight at every step: many
small products, and as many sums of arrays of the weight's size. Here the loop
yields what each product read and what its result's gradient is, and the
weight's gradient is one product of these, over all steps.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


class _Tap:
  """Stands for a weight within a loop: remembers x of the one x @ weight."""

  def __init__(self, weight: jax.Array, slack: jax.Array | None):
    self._weight, self._slack = weight, slack
    self.read: jax.Array | None = None
    self.shape: tuple[int, ...] | None = None

  def __rmatmul__(self, x: jax.Array) -> jax.Array:
    if self.read is not None:
      raise ValueError("a step may use a weight only once, as x @ weight")
    product = x @ self._weight
    self.read, self.shape = x, product.shape
    return product if self._slack is None else product + self._slack


def scan(
  step: Callable[[Any, Any, Carry, Any], tuple[Carry, Any]],
  weights: Any,
  others: Any,
  carry: Carry,
  xs: Any,
  *,
  reverse: bool = False,
) -> tuple[Carry, Any]:
  """`jax.lax.scan` of a step with weights.

  Derivatives are of first order, in reverse mode.

  Args:
    step: (weights, others, carry, x) -> (carry, y); it uses every weight once,
      as x @ weight, and captures no array.
    weights: matrices.
    others: whatever else the steps read.
    carry: where to start.
    xs: arrays that have a row a step.
    reverse: whether to run from the last step to the first.

  Returns:
    The last carry, and the y of all steps.

  Raises:
    ValueError: when it is differentiated, if a step does not use each weight
      once.

  Example:
    >>> def step(weight, bias, state, x):
    ...   state = jnp.tanh(state @ weight + bias * x)
    ...   return state, state
    >>> state = jnp.zeros((1, 2))
    >>> state, states = scan(
    ...   step, jnp.eye(2), jnp.ones((1, 2)), state, jnp.ones((3, 1, 2))
    ... )
    >>> states.shape
    (3, 1, 2)
  """
  leaves, tree = jax.tree.flatten(weights)

  def tapped(leaves, slacks, others, carry, x):
    """A step, and what tells of its products."""
    taps = [_Tap(leaf, slack) for leaf, slack in zip(leaves, slacks)]
    result = step(jax.tree.unflatten(tree, taps), others, carry, x)
    if any(tap.read is None for tap in taps):
      raise ValueError("a step must use every weight, as x @ weight")
    return result, taps

  @jax.custom_vjp
  def run(leaves, others, carry, xs):
    def body(carry, x):
      return step(jax.tree.unflatten(tree, leaves), others, carry, x)

    return jax.lax.scan(body, carry, xs, reverse=reverse)

  def forward(leaves, others, carry, xs):
    def loop(others, carry, xs, slacks):
      def body(carry, now):
        x, slacks = now
        (carry, y), taps = tapped(leaves, slacks, others, carry, x)
        return carry, (y, [tap.read for tap in taps])

      carry, (ys, read) = jax.lax.scan(
        body, carry, (xs, slacks), reverse=reverse
      )
      return (carry, ys), read

    slacks = _slacks(tapped, leaves, others, carry, xs)
    result, back, read = jax.vjp(loop, others, carry, xs, slacks, has_aux=True)
    return result, (back, read)

  def backward(kept, cotangents):
    back, read = kept
    others, carry, xs, slacks = back(cotangents)
    by_weight = [
      jnp.einsum("...i,...o->io", x, error) for x, error in zip(read, slacks)
    ]
    return by_weight, others, carry, xs

  run.defvjp(forward, backward)
  return run(leaves, others, carry, xs)


def _slacks(tapped: Callable, leaves, others, carry, xs) -> list[jax.Array]:
  """Zeros for each step's products, whose gradients are the products'."""
  shapes: list[Any] = []

  def once(leaves, others, carry, xs):
    first = jax.tree.map(lambda x: x[0], xs)
    _, taps = tapped(leaves, [None] * len(leaves), others, carry, first)
    shapes.extend(tap.shape for tap in taps)

  jax.eval_shape(once, leaves, others, carry, xs)
  length = len(jax.tree.leaves(xs)[0])
  return [
    jnp.zeros((length, *shape), leaf.dtype)
    for leaf, shape in zip(leaves, shapes)
  ]
