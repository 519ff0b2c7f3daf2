"""Which chunks of a sequence each device of a ring holds.

Axes: n devices, c chunks per device, L tokens.
"""

from typing import Annotated as Shaped
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Order = Literal["zigzag", "contiguous"]
_CHUNKS = {"zigzag": 2, "contiguous": 1}


def num_chunks(order: Order) -> int:
  """c, 2 for "zigzag" and 1 for "contiguous"; ValueError for other orders."""
  if order not in _CHUNKS:
    known = " or ".join(map(repr, _CHUNKS))
    raise ValueError(f"order must be {known}, got {order!r}")
  return _CHUNKS[order]


def chunk_of(device, place, num_devices: int, order: Order):
  """The index in the sequence of the chunk at `place` on a device."""
  if order == "contiguous":
    return device
  last = 2 * num_devices - 1
  return device + place * (last - 2 * device)


def arrange(
  tokens: Shaped[jax.Array, "... L ..."],
  num_devices: int,
  *,
  axis: int,
  order: Order = "contiguous",
) -> Shaped[jax.Array, "... L ..."]:
  """Permutes a sequence so that each device's shard is contiguous.

  In zigzag order the sequence is divided into 2n chunks, and device d holds the
  chunks d and 2n - 1 - d. With a causal mask, early queries attend to few
  keys and late ones to many; in zigzag order all devices have the same work.

  Args:
    tokens: [..., L, ...].
    num_devices: n.
    axis: of the sequence; its length L must be a multiple of n, or of 2n in
      zigzag order.
    order: "contiguous", which changes nothing, or "zigzag".

  Returns:
    The permuted array, of the same shape.

  Raises:
    ValueError: if L is no such multiple, or the order is unknown.

  Example:
    >>> arrange(jnp.arange(8), 2, axis=0, order="zigzag")
    Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
  """
  return _reordered(tokens, _chunks(num_devices, order), axis)


def restore(
  tokens: Shaped[jax.Array, "... L ..."],
  num_devices: int,
  *,
  axis: int,
  order: Order = "contiguous",
) -> Shaped[jax.Array, "... L ..."]:
  """Undoes `arrange`.

  Args:
    tokens: [..., L, ...], from `arrange`.
    num_devices: n.
    axis: of the sequence, as given to `arrange`.
    order: as given to `arrange`.

  Returns:
    The array in the order of the sequence.

  Raises:
    ValueError: if L is no such multiple, or the order is unknown.

  Example:
    >>> arranged = jnp.array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> restore(arranged, 2, axis=0, order="zigzag")
    Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
  """
  return _reordered(tokens, np.argsort(_chunks(num_devices, order)), axis)


def ring_positions(
  axis_name: str, length: int, *, order: Order = "contiguous"
) -> jax.Array:
  """The positions in the sequence of a device's tokens.

  Args:
    axis_name: the mesh axis that shards tokens; call this in `jax.shard_map`.
    length: of the device's shard.
    order: as given to `arrange`.

  Returns:
    int32 [length], for instance for rotary positions.

  Raises:
    ValueError: if the length is odd in zigzag order, or the order is unknown.

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
  """The chunks of device 0, then those of device 1 and so on."""
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
  chunks = tokens.reshape(*shape[:axis], len(places), size, *shape[axis + 1 :])
  return jnp.take(chunks, jnp.asarray(places), axis=axis).reshape(shape)


def _divided(length: int, chunks: int) -> int:
  if length % chunks:
    raise ValueError(
      f"a length of {length} does not divide into {chunks} equal pieces; pad it"
      f" to a multiple of {chunks}"
    )
  return length // chunks
