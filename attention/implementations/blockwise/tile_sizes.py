"""Default sizes of tiles."""

import dataclasses
import math

import jax

from attention.arrays import axes
from attention.normalizers import is_online
from attention.request import Request


@dataclasses.dataclass(frozen=True)
class Limits:
  """The largest tiles of a platform."""

  most_keys: int  # or queries
  scores: int  # elements of the score's intermediate arrays, in a square tile
  most_rows: int  # queries of a block of whole rows
  queries_per_key: int  # where `scores` limits the keys
  # Tiles are multiples of this, if such a size divides the length.
  lanes: int | None = None

  def side(
    self,
    length: int,
    asked: int | None,
    elements_per_pair: int,
    multiple: int = 1,
  ) -> int:
    """The number of queries or keys in a tile; None for `asked` chooses it."""
    # Where `scores` limits a tile, `multiple` of the side of a square.
    if asked is not None:
      return min(asked, length)
    square = math.isqrt(self.scores // elements_per_pair)
    largest = min(self.most_keys, max(multiple * square, 16))
    if length <= largest:
      return length
    size = -(-length // -(-length // largest))
    return self._divisor(length, largest) or axes.round_up(size, 16)

  def _divisor(self, length: int, largest: int) -> int | None:
    """The largest size of whole registers that divides a length, if any."""
    if self.lanes is None:
      return None
    sizes = range(largest // self.lanes, largest // (2 * self.lanes), -1)
    divisors = (each * self.lanes for each in sizes)
    return next((size for size in divisors if length % size == 0), None)

  def block_of_rows(
    self, length: int, asked: int | None, elements_per_row: int
  ) -> int:
    """The number of queries in a block of whole rows; None chooses it."""
    if asked is None:
      asked = min(max(self.scores // elements_per_row, 1), self.most_rows)
    return min(asked, length)


# Measured on CPUs (`python -m benchmarks.attention`): a product of fewer than
# 512 queries and keys leaves cores idle, and more than 4 MiB of scores in
# float32 leave the caches. Scores that need many elements for a pair are faster
# in tiles of twice as many queries, and elements.
_CPU = Limits(most_keys=512, scores=1 << 20, most_rows=128, queries_per_key=2)
# A normalizer reads a block of rows about so many times and the online softmax
# a tile once, so that a block has to be smaller to stay in the caches.
_READS = 2
# GPUs and TPUs start several operations for each tile, so few large tiles are
# best. All leading entries are in a tile, because they may be sharded.
_GPU = Limits(most_keys=4096, scores=1 << 24, most_rows=1024, queries_per_key=1)
# TPUs copy tokens to pad them, and tiles that cut a register.
_TPU = dataclasses.replace(_GPU, lanes=128)


def limits(platform: str) -> Limits:
  """The largest tiles of a platform, by the name of `Request.target`."""
  return {"cpu": _CPU, "tpu": _TPU}.get(platform, _GPU)


def leading_blocks(
  request: Request, asked: int | None, queries: int, keys: int
) -> list[tuple[int, ...]]:
  """Candidate sizes of a tile along the leading axes, best first."""
  # `asked` limits the product of the sizes; None chooses a limit, for tiles of
  # so many queries and keys. The last candidate has all entries of the leading
  # axes, which every score supports.
  whole = tuple(request.leading)
  if asked is None:
    sharing = _devices_of_a_cpu() if request.target == "cpu" else 0
    if not sharing:
      return [whole]
    if not is_online(request.normalizer):
      # A block has whole rows.
      keys *= _READS * -(-request.scores_shape[-1] // keys)
    elements = queries * keys * request.elements_per_pair
    asked = max(_CPU.scores // sharing // elements, 1)
  block = _innermost_first(asked, request.scores_shape[:-2], whole)
  cuts = range(len(whole), -1, -1)
  return list(dict.fromkeys(block[:axis] + whole[axis:] for axis in cuts))


def _devices_of_a_cpu() -> int:
  """The number of devices on a CPU; 0 if leading axes may be sharded."""
  mesh = jax.sharding.get_abstract_mesh()
  # Under `jax.shard_map` over all axes each device has its own leading axes.
  shared = {name for name, size in mesh.shape.items() if size > 1}
  own = shared and shared <= set(mesh.manual_axes)
  return jax.local_device_count() if own or jax.device_count() == 1 else 0


def _innermost_first(limit, scores, leading) -> tuple[int, ...]:
  block: list[int] = []
  for own, size in reversed(list(zip(scores, leading))):
    if own != size:
      part = size  # values that share a score belong to the same tile
    else:
      parts = (part for part in range(1, size + 1) if size % part == 0)
      part = max(part for part in parts if part <= max(limit, 1))
      limit = limit // part if part == size else 1
    block.append(part)
  return tuple(reversed(block))
