"""A scan over time that computes the gradients of weights in one product."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


class _RecordingWeight:
  """Replaces a weight in a step and records x of its one x @ weight."""

  def __init__(self, weight: jax.Array, offset: jax.Array | None):
    self._weight, self._offset = weight, offset
    self.read: jax.Array | None = None
    self.product: jax.Array | None = None

  def __rmatmul__(self, x: jax.Array) -> jax.Array:
    if self.read is not None:
      raise ValueError("a step may use a weight only once, as x @ weight")
    self.read, self.product = x, x @ self._weight
    if self._offset is None:
      return self.product
    return self.product + self._offset


def scan(
  step: Callable[[Any, Any, Carry, Any], tuple[Carry, Any]],
  weights: Any,  # matrices, each of which the step uses once, as x @ weight
  others: Any,  # all other arrays that the step uses: it closes over none
  carry: Carry,
  xs: Any,
  *,
  reverse: bool = False,
) -> tuple[Carry, Any]:
  """`jax.lax.scan` of a step with weights; supports first-order `jax.grad`."""
  leaves, tree = jax.tree.flatten(weights)

  def recorded_step(leaves, offsets, others, carry, x):
    """Runs a step and returns its result and its recorded products."""
    recorders = [
      _RecordingWeight(leaf, offset) for leaf, offset in zip(leaves, offsets)
    ]
    result = step(jax.tree.unflatten(tree, recorders), others, carry, x)
    if any(recorder.read is None for recorder in recorders):
      raise ValueError("a step must use every weight, as x @ weight")
    return result, recorders

  @jax.custom_vjp
  def run(leaves, others, carry, xs):
    def body(carry, x):
      return step(jax.tree.unflatten(tree, leaves), others, carry, x)

    return jax.lax.scan(body, carry, xs, reverse=reverse)

  def forward(leaves, others, carry, xs):
    def loop(others, carry, xs, offsets):
      def body(carry, now):
        x, offsets = now
        (carry, y), recorders = recorded_step(leaves, offsets, others, carry, x)
        return carry, (y, [recorder.read for recorder in recorders])

      carry, (ys, read) = jax.lax.scan(
        body, carry, (xs, offsets), reverse=reverse
      )
      return (carry, ys), read

    offsets = _zero_offsets(recorded_step, leaves, others, carry, xs)
    result, back, read = jax.vjp(loop, others, carry, xs, offsets, has_aux=True)
    return result, (back, read)

  def backward(kept, cotangents):
    back, read = kept
    others, carry, xs, offsets = back(cotangents)
    by_weight = [
      jnp.einsum("...i,...o->io", x, error) for x, error in zip(read, offsets)
    ]
    return by_weight, others, carry, xs

  run.defvjp(forward, backward)
  return run(leaves, others, carry, xs)


def _zero_offsets(
  recorded_step: Callable, leaves, others, carry, xs
) -> list[jax.Array]:
  """Returns zeros to add to each step's products, to get their gradients."""

  def products(leaves, others, carry, xs):
    first = jax.tree.map(lambda x: x[0], xs)
    offsets = [None] * len(leaves)
    _, recorders = recorded_step(leaves, offsets, others, carry, first)
    return [recorder.product for recorder in recorders]

  length = len(jax.tree.leaves(xs)[0])
  return [
    jnp.zeros((length, *product.shape), product.dtype)
    for product in jax.eval_shape(products, leaves, others, carry, xs)
  ]
