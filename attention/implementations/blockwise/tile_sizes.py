"""How large a tile is."""

import math
from collections.abc import Sequence

import jax

# Measured on CPUs (`python -m benchmarks.attention`): a product of fewer than
# 512 queries and keys leaves cores idle, and more than 4 MiB of scores in
# float32 leave the caches.
_SIDE = 512
_SCORES = 1 << 20


def side(length: int, asked: int | None, numbers: int = 1) -> int:
  """How many of T queries, or of S keys, a tile has.

  Args:
    length: T or S.
    asked: what the user wants; None for tiles of nearly equal size.
    numbers: how many numbers the score needs at once for a pair, for instance
      D if it makes all of query - key.

  Returns:
    A number from 1 to `length`.

  Example:
    >>> side(1030, None), side(1030, 256), side(5, 256)
    (352, 256, 5)
  """
  if asked is not None:
    return min(asked, length)
  largest = min(_SIDE, max(math.isqrt(_SCORES // numbers), 16))
  tiles = -(-length // largest)
  size = -(-length // tiles)
  return size if tiles == 1 else -(-size // 16) * 16


def leading_blocks(
  asked: int | None,
  elements: int,
  scores: Sequence[int],
  leading: Sequence[int],
) -> list[tuple[int, ...]]:
  """How many entries of each leading axis a tile may have, best first.

  Args:
    asked: the largest number of entries in all; None chooses.
    elements: the elements of the score's intermediate arrays per entry.
    scores: the leading axes of the scores.
    leading: the leading axes of the context; the values may have more of them.

  Returns:
    Divisors of the leading axes. The last item is all entries of all axes;
    the others keep all entries of fewer and fewer axes on the left cut.

  Example:
    >>> leading_blocks(4, 64, (2, 6), (2, 6))
    [(1, 3), (1, 6), (2, 6)]
  """
  whole = tuple(leading)
  if asked is None:
    sharing = _devices_of_a_cpu()
    if not sharing:
      return [whole]
    asked = max(_SCORES // sharing // elements, 1)
  block = _innermost_first(asked, scores, leading)
  cuts = range(len(whole), -1, -1)
  return list(dict.fromkeys(block[:axis] + whole[axis:] for axis in cuts))


def _devices_of_a_cpu() -> int:
  """How many devices share a CPU's cores and caches, each with its own tile.

  0 where leading axes are not to be cut: they may lie on many devices.
  """
  if jax.default_backend() != "cpu":
    return 0
  mesh = jax.sharding.get_abstract_mesh()
  # Within `jax.shard_map` a device has leading axes of its own.
  shared = {name for name, size in mesh.shape.items() if size > 1}
  own = shared and shared <= set(mesh.manual_axes)
  return jax.local_device_count() if own or jax.device_count() == 1 else 0


def _innermost_first(limit, scores, leading) -> tuple[int, ...]:
  block: list[int] = []
  for own, size in reversed(list(zip(scores, leading))):
    if own != size:
      part = size  # all values that share a score belong to the same tile
    else:
      parts = (part for part in range(1, size + 1) if size % part == 0)
      part = max(part for part in parts if part <= max(limit, 1))
      limit = limit // part if part == size else 1
    block.append(part)
  return tuple(reversed(block))
