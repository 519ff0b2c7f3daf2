"""Which tokens of a sequence a device has.

Axes: n devices, c chunks a device, L tokens.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Order = Literal["zigzag", "contiguous"]
_CHUNKS = {"zigzag": 2, "contiguous": 1}


def num_chunks(order: Order) -> int:
  """c, the number of pieces of the sequence that a device has.

  Args:
    order: "zigzag" or "contiguous".

  Returns:
    2 or 1.

  Raises:
    ValueError: if the order is unknown.

  Example:
    >>> num_chunks("zigzag")
    2
  """
  if order not in _CHUNKS:
    known = " or ".join(map(repr, _CHUNKS))
    raise ValueError(f"order must be {known}, got {order!r}")
  return _CHUNKS[order]


def chunk_of(device, place, num_devices: int, order: Order):
  """The number, within the sequence, of a chunk of a device.

  Args:
    device: d, an integer or an array of them.
    place: 0 for its first chunk, 1 for its second; likewise.
    num_devices: n.
    order: "zigzag" or "contiguous".

  Returns:
    An integer, or an array of them.

  Example:
    >>> [chunk_of(1, place, 4, "zigzag") for place in (0, 1)]
    [1, 6]
  """
  if order == "contiguous":
    return device
  last = 2 * num_devices - 1
  return device + place * (last - 2 * device)


def arrange(
  tokens: jax.Array, num_devices: int, *, axis: int, order: Order = "contiguous"
) -> jax.Array:
  """Lays a sequence out so that the share of each device is in one piece.

  In zigzag order device d of n has the chunks d and 2n - 1 - d of 2n. With a
  causal mask early queries see few keys and late ones many; so every device
  has as much to do as any other.

  Args:
    tokens: [..., L, ...].
    num_devices: n.
    axis: of the sequence; n c divides its length L.
    order: "zigzag", or "contiguous" for the sequence as it is.

  Returns:
    The array, reordered.

  Raises:
    ValueError: if n c does not divide L, or the order is unknown.

  Example:
    >>> arrange(jnp.arange(8), 2, axis=0, order="zigzag")
    Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
  """
  places = _chunks(num_devices, order)
  return _reordered(tokens, places, axis)


def restore(
  tokens: jax.Array, num_devices: int, *, axis: int, order: Order = "contiguous"
) -> jax.Array:
  """Undoes `arrange`.

  Args:
    tokens: [..., L, ...], from `arrange`.
    num_devices: n.
    axis: as there.
    order: as there.

  Returns:
    The sequence from its first token to its last.

  Raises:
    ValueError: if n c does not divide L, or the order is unknown.

  Example:
    >>> arranged = jnp.array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> restore(arranged, 2, axis=0, order="zigzag")
    Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
  """
  places = np.argsort(_chunks(num_devices, order))
  return _reordered(tokens, places, axis)


def ring_positions(
  axis_name: str, length: int, *, order: Order = "contiguous"
) -> jax.Array:
  """Where a device's tokens stand in the whole sequence.

  Args:
    axis_name: of the mesh; call it within `jax.shard_map`.
    length: of the device's share.
    order: as given to `arrange`.

  Returns:
    int32 [length], for instance for rotary positions.

  Raises:
    ValueError: if c does not divide the length, or the order is unknown.

  Example:
    >>> mesh = jax.make_mesh((2,), ("sequence",))
    >>> jax.shard_map(
    ...   lambda: ring_positions("sequence", 4, order="zigzag"),
    ...   mesh=mesh, in_specs=(), out_specs=jax.P("sequence"),
    ... )()
    Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
  """
  device, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  chunk = _divided(length, num_chunks(order))
  return jnp.concatenate(
    [
      chunk_of(device, place, size, order) * chunk
      + jnp.arange(chunk, dtype=jnp.int32)
      for place in range(num_chunks(order))
    ]
  )


def _chunks(num_devices: int, order: Order) -> np.ndarray:
  """The chunks of all devices, one device after the other."""
  return np.array(
    [
      chunk_of(device, place, num_devices, order)
      for device in range(num_devices)
      for place in range(num_chunks(order))
    ]
  )


def _reordered(tokens, places, axis):
  axis = axis % tokens.ndim
  size = _divided(tokens.shape[axis], len(places))
  shape = tokens.shape
  pieces = tokens.reshape(*shape[:axis], len(places), size, *shape[axis + 1 :])
  return jnp.take(pieces, jnp.asarray(places), axis=axis).reshape(shape)


def _divided(length: int, pieces: int) -> int:
  if length % pieces:
    raise ValueError(
      f"a length of {length} does not divide into {pieces} equal pieces; pad it"
      f" to a multiple of {pieces}"
    )
  return length // pieces
