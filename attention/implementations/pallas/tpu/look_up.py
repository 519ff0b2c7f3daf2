"""Numbers by distance in the kernels for TPUs.

A TPU looks up numbers among the 128 lanes of a register. Of more numbers each
register is looked up in, and the right one is selected.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.implementations.pallas.tpu.tokens import LANES, indices


def by_distance(
  numbers: jax.Array, first: Any, *, length: int, is_descending: bool
) -> jax.Array:
  """See `pallas.look_up`."""
  *leading, rows, size = numbers.shape
  matrix = numbers.reshape(rows, size)
  first = jnp.asarray(first, jnp.int32)
  found = _looked_up(length, is_descending, matrix, first)
  return found.reshape(*leading, rows, length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _looked_up(length, is_descending, numbers, first):
  """`by_distance` of a matrix."""
  size = numbers.shape[1]
  places = _at_column_0(numbers.shape[0], first) + indices(length, 1)
  places = jnp.clip(places, 0, size - 1)
  if is_descending:
    places = size - 1 - places
  return _taken(numbers, places)


def _forward(length, is_descending, numbers, first):
  found = _looked_up(length, is_descending, numbers, first)
  return found, (jax.ShapeDtypeStruct(numbers.shape, numbers.dtype), first)


def _backward(length, is_descending, residuals, cotangent):
  """A number between the ends belongs to one pair; sums for the ends."""
  like, first = residuals
  rows, size = like.shape
  at_column_0 = _at_column_0(rows, first)
  places = at_column_0 + indices(length, 1)

  def of_end(chosen):
    chosen = jnp.where(chosen, cotangent, 0.0)
    return jnp.sum(chosen, axis=1, keepdims=True)

  own = indices(axes.round_up(size, LANES), 1)
  own = size - 1 - own if is_descending else own
  columns = own - at_column_0
  inside = (columns >= 0) & (columns < length)
  found = _taken(cotangent, jnp.clip(columns, 0, length - 1))
  found = jnp.where(inside, found, 0.0)
  found = jnp.where(own == 0, of_end(places <= 0), found)
  if size > 1:
    found = jnp.where(own == size - 1, of_end(places >= size - 1), found)
  else:
    found += jnp.where(own == 0, of_end(places > 0), 0.0)
  return found[:, :size], None


_looked_up.defvjp(_forward, _backward)


def _taken(numbers: jax.Array, places: jax.Array) -> jax.Array:
  """numbers[i, places[i, j]]."""
  missing = axes.round_up(numbers.shape[1], LANES) - numbers.shape[1]
  if missing:
    zeros = jnp.zeros((numbers.shape[0], missing), numbers.dtype)
    numbers = jnp.concatenate([numbers, zeros], axis=1)
  columns = range(0, places.shape[1], LANES)
  parts = [_register(numbers, places[:, n : n + LANES]) for n in columns]
  return jnp.concatenate(parts, axis=1)


def _register(numbers: jax.Array, places: jax.Array) -> jax.Array:
  """`_taken` for 128 columns of places."""

  def found(start):
    own = places - start
    lane = jnp.clip(own, 0, LANES - 1)
    register = numbers[:, start : start + LANES]
    return own == lane, jnp.take_along_axis(
      register, lane, axis=1, mode="promise_in_bounds"
    )

  _, result = found(0)
  for start in range(LANES, numbers.shape[1], LANES):
    is_here, other = found(start)
    result = jnp.where(is_here, other, result)
  return result


def _at_column_0(rows: int, first: jax.Array) -> jax.Array:
  """The places of column 0, [rows, 1]."""
  return first + (rows - 1) - indices(rows, 0)
