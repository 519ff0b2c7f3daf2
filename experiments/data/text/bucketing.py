"""Length buckets: which examples of an epoch share a batch.

A compiled step takes arrays of one shape. A few shapes are chosen for the
lengths of a corpus; every example belongs to the smallest shape that holds it.
All batches of a shape have the same number of rows, chosen so that batches of
all shapes have about the same number of tokens.

Axes: N examples, K shapes; 2 stands for source and target length.
"""

from typing import NamedTuple

import numpy as np

# Candidate lengths on each side.
_CANDIDATES = 64


class EpochPlan(NamedTuple):
  """The batches of an epoch, in order.

  Attributes:
    shapes: [M] index of the shape of each batch.
    examples: M vectors of indices of examples.
    leftover: indices of examples that did not fill a batch.
  """

  shapes: np.ndarray
  examples: list[np.ndarray]
  leftover: np.ndarray


def choose_shapes(lengths: np.ndarray, num_shapes: int) -> np.ndarray:
  """Chooses shapes greedily so that examples need little padding.

  The first shape holds every example; each further shape is the one that saves
  the most padding. The greedy set saves at least 63% of what the best set
  would (Nemhauser et al., 1978).

  Args:
    lengths: [N, 2].
    num_shapes: the largest number of shapes, K.

  Returns:
    [K, 2] shapes, sorted by their sum; fewer if more would save nothing.

  Example:
    >>> choose_shapes(np.array([[3, 3], [3, 4], [9, 9]]), 2)
    array([[3, 4],
           [9, 9]])
  """
  sides = [_spread(np.unique(side), _CANDIDATES) for side in lengths.T]
  candidates = np.stack(np.meshgrid(*sides), -1).reshape(-1, 2)
  # A length between two candidates fits the shapes that the larger one fits.
  rounded = [
    side[np.searchsorted(side, each)] for side, each in zip(sides, lengths.T)
  ]
  pairs, counts = np.unique(np.stack(rounded, 1), axis=0, return_counts=True)
  fits = (pairs[None] <= candidates[:, None]).all(-1)
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


def batch_sizes(
  shapes: np.ndarray, *, size: int, unit: str, multiple: int
) -> np.ndarray:
  """Returns the number of rows of a batch of each shape.

  Args:
    shapes: [K, 2].
    size: of a batch, in units.
    unit: "examples", or "tokens" of the longer side, padding included.
    multiple: each number of rows is a multiple of this, so that devices and
      accumulated parts get equal shares.

  Returns:
    [K] numbers of rows, at least `multiple`.

  Example:
    >>> batch_sizes(np.array([[3, 4], [9, 9]]), size=100, unit="tokens",
    ...             multiple=4)
    array([24,  8])
  """
  longest = shapes.max(1) if unit == "tokens" else np.ones(len(shapes), int)
  return np.maximum(size // longest // multiple, 1) * multiple


def assign(lengths: np.ndarray, shapes: np.ndarray) -> np.ndarray:
  """Returns [N] indices of the first shape [K, 2] that holds each example."""
  return (lengths[:, None] <= shapes[None]).all(-1).argmax(1)


def plan_epoch(
  lengths: np.ndarray,
  shapes: np.ndarray,
  sizes: np.ndarray,
  leftover: np.ndarray,
  rng: np.random.Generator,
) -> EpochPlan:
  """Arranges all examples in full batches, in random order.

  Args:
    lengths: [N, 2].
    shapes: [K, 2]; the last one holds every example.
    sizes: [K] rows of a batch.
    leftover: indices of examples that the epoch before left over.
    rng: decides which examples share a batch, and the order of the batches.

  Returns:
    Batches with each example once, and the earlier leftovers once more, except
    for the examples that are left over now.
  """
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
