"""Arrays of a score that a kernel for TPUs reads whole, and their gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.pallas.operands import Operand
from attention.implementations.pallas.tpu.tokens import LANES


def stored_shape(operand: Operand) -> tuple[int, ...]:
  """The shape in VMEM of the array of one head, of rank 2 at least."""
  if not operand.core:
    return (1, LANES)
  core = (1,) * (2 - len(operand.core)) + operand.core
  return (*core[:-2], core[-1], core[-2]) if is_transposed(operand) else core


def is_transposed(operand: Operand) -> bool:
  """Whether the last two axes are swapped in VMEM.

  XLA stores a matrix [128, 64] as [64, 128], which fills whole registers.
  """
  *_, rows, columns = (1, 1, *operand.core)
  return columns % LANES != 0 and rows % LANES == 0


def _swapped(array: jax.Array, operand: Operand) -> jax.Array:
  return array.mT if is_transposed(operand) else array


def stored(array: jax.Array, operand: Operand) -> jax.Array:
  """[leading..., core...] as a kernel reads it."""
  leading = array.shape[: len(operand.axes)]
  return _swapped(array, operand).reshape(*leading, *stored_shape(operand))


def loaded(stored: jax.Array, operand: Operand) -> jax.Array:
  """The array of one head, from VMEM."""
  return _swapped(stored, operand).reshape(operand.core)


def add(ref: Any, gradient: jax.Array, operand: Operand) -> None:
  """Adds to the gradient of the array of one head."""
  gradient = _swapped(gradient, operand)
  is_vector = gradient.ndim < 2
  ref[...] += jnp.broadcast_to(
    gradient.reshape(1, -1) if is_vector else gradient, ref.shape
  )


def restored(gradient: jax.Array, operand: Operand) -> jax.Array:
  """The gradients of all heads, [leading..., core...]."""
  if not operand.core:
    return gradient[..., 0, 0]
  gradient = _swapped(gradient, operand)
  leading = gradient.shape[: gradient.ndim - len(stored_shape(operand))]
  return gradient.reshape(*leading, *operand.core)


def kept_axes(operand: Operand) -> int:
  """How many leading axes a gradient has; it is summed over those after."""
  # A kernel adds to a block until the grid leaves it, so that it cannot sum
  # over an axis before one of the array's.
  return 1 + max((n for n in operand.axes if n is not None), default=-1)


def is_first(visit: Any, operand: Operand) -> jax.Array:
  """Whether a visit is the first that adds to the gradient."""
  later = [visit.number, *visit.indices[kept_axes(operand) :]]
  return functools.reduce(jnp.logical_and, [each == 0 for each in later])
