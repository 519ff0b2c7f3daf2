"""A scan over time that computes the gradients of weights in one product."""

import functools
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

  @jax.custom_vjp
  def run(weights, others, carry, xs):
    body = functools.partial(step, weights, others)
    return jax.lax.scan(body, carry, xs, reverse=reverse)

  def forward(weights, others, carry, xs):
    def loop(others, carry, xs, offsets):
      def body(carry, now):
        x, offsets = now
        (carry, y), recorders = _recorded(
          step, weights, offsets, others, carry, x
        )
        return carry, (y, jax.tree.map(lambda each: each.read, recorders))

      carry, (ys, read) = jax.lax.scan(
        body, carry, (xs, offsets), reverse=reverse
      )
      return (carry, ys), read

    offsets = _zero_offsets(step, weights, others, carry, xs)
    result, back, read = jax.vjp(loop, others, carry, xs, offsets, has_aux=True)
    return result, (back, read)

  def backward(kept, cotangents):
    back, read = kept
    others, carry, xs, offsets = back(cotangents)
    product = functools.partial(jnp.einsum, "...i,...o->io")
    return jax.tree.map(product, read, offsets), others, carry, xs

  run.defvjp(forward, backward)
  return run(weights, others, carry, xs)


def _recorded(step: Callable, weights, offsets, others, carry, x):
  """Runs a step; returns its result, and a recorder for each weight."""
  recorders = jax.tree.map(_RecordingWeight, weights, offsets)
  result = step(recorders, others, carry, x)
  if any(each.read is None for each in jax.tree.leaves(recorders)):
    raise ValueError("a step must use every weight, as x @ weight")
  return result, recorders


def _zero_offsets(step: Callable, weights, others, carry, xs):
  """Returns zeros to add to each step's products, to get their gradients."""

  def products(weights, others, carry, xs):
    first = jax.tree.map(lambda x: x[0], xs)
    offsets = jax.tree.map(lambda _: None, weights)
    _, recorders = _recorded(step, weights, offsets, others, carry, first)
    return jax.tree.map(lambda each: each.product, recorders)

  length = len(jax.tree.leaves(xs)[0])
  return jax.tree.map(
    lambda product: jnp.zeros((length, *product.shape), product.dtype),
    jax.eval_shape(products, weights, others, carry, xs),
  )
