"""Length buckets: which examples of an epoch share a batch."""

from typing import NamedTuple

import numpy as np

from attention.arrays.axes import round_up
from experiments.config import TrainConfig

# Candidate lengths on each side.
_CANDIDATES = 64


class EpochPlan(NamedTuple):
  """The batches of an epoch, in order."""

  shapes: np.ndarray  # [M] index of the shape of each batch
  examples: list[np.ndarray]  # M vectors of indices of examples
  leftover: np.ndarray  # indices of examples that did not fill a batch


def choose_shapes(
  lengths: np.ndarray, num_shapes: int, multiple: int = 1
) -> np.ndarray:
  """Chooses shapes [K, 2] greedily: lengths [N, 2] need little padding.

  The lengths of shapes are multiples of `multiple`.
  """
  lengths = round_up(lengths, multiple)
  sides = [_spread(np.unique(side), _CANDIDATES) for side in lengths.T]
  candidates = np.stack(np.meshgrid(*sides), -1).reshape(-1, 2)
  # A length between two candidates fits the shapes that the larger one fits.
  source, target = map(np.searchsorted, sides, lengths.T)
  counts = np.bincount(source * _CANDIDATES + target)
  codes = np.flatnonzero(counts)
  counts = counts[codes]
  pairs = np.stack(
    [side[each] for side, each in zip(sides, np.divmod(codes, _CANDIDATES))], 1
  )
  fits = (pairs[None] <= candidates[:, None]).all(-1)
  # The first shape holds every example; each further one saves most padding.
  # They save at least 63% of what the best set would (Nemhauser et al., 1978).
  shapes = [candidates[-1]]
  padded = np.full(len(pairs), shapes[0].sum())
  while len(shapes) < num_shapes:
    saved = np.maximum(padded - candidates.sum(1)[:, None], 0) * fits
    gains = saved @ counts
    best = int(gains.argmax())
    if not gains[best]:
      break
    shapes.append(candidates[best])
    padded -= saved[best]
  return np.array(sorted(map(tuple, shapes), key=lambda s: (sum(s), s)))


def batch_sizes(shapes: np.ndarray, train: TrainConfig) -> np.ndarray:
  """Returns the number of rows of a batch of each shape."""
  size, multiple = train.batch_size, train.row_multiple
  if train.batch_unit == "examples":
    return np.full(len(shapes), size)
  return np.maximum(size // shapes.max(1) // multiple, 1) * multiple


def assign(lengths: np.ndarray, shapes: np.ndarray) -> np.ndarray:
  """Returns [N] indices of the first shape [K, 2] that holds each example."""
  first = np.zeros(len(lengths), np.min_scalar_type(len(shapes)))
  for index in reversed(range(len(shapes))):
    first[(lengths <= shapes[index]).all(1)] = index
  return first


def plan_epoch(
  lengths: np.ndarray,
  shapes: np.ndarray,
  sizes: np.ndarray,
  leftover: np.ndarray,
  rng: np.random.Generator,
) -> EpochPlan:
  """Arranges all examples in full batches, in random order."""
  pool = np.concatenate([leftover, rng.permutation(len(lengths))])
  bucket = assign(lengths[pool], shapes)
  batches: list[tuple[int, np.ndarray]] = []
  remaining = []
  for index, size in enumerate(sizes):
    members = pool[bucket == index]
    full = len(members) // size * size
    batches += [(index, rows) for rows in members[:full].reshape(-1, size)]
    remaining.append(members[full:])
  shuffled = rng.permutation(len(batches))
  return EpochPlan(
    np.array([batches[i][0] for i in shuffled], int),
    [batches[i][1] for i in shuffled],
    np.concatenate(remaining),
  )


def _spread(values: np.ndarray, count: int) -> np.ndarray:
  """Returns at most `count` of sorted values, evenly spread, with the last."""
  picks = np.linspace(0, len(values) - 1, min(count, len(values)))
  return values[picks.round().astype(int)]
