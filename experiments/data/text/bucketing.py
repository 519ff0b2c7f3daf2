"""Which examples of an epoch share a batch, so that little of it is padding.

A compiled step takes arrays of one shape. A few shapes are chosen for the
lengths that a corpus has; every example goes to the smallest shape that holds
it, and all batches of a shape have the same number of rows, so that their
number of tokens is about the same for all shapes.

Axes: N examples, K shapes; the 2 are source and target length.
"""

from typing import NamedTuple

import numpy as np

# Of candidates for a shape, tried on each side.
_CANDIDATES = 64


class EpochPlan(NamedTuple):
  """The batches of an epoch, in order.

  Attributes:
    shapes: [M] the shape of each batch, an index.
    members: M vectors of indices of examples.
    left: indices of examples that did not fill a batch.
  """

  shapes: np.ndarray
  members: list[np.ndarray]
  left: np.ndarray


def choose_shapes(lengths: np.ndarray, num_shapes: int) -> np.ndarray:
  """Chooses shapes that pad the examples little, one after the other.

  The first shape holds everything; each further one is what saves most. A set
  chosen greedily for such a gain saves at least 63% of what the best set would
  (Nemhauser et al., 1978).

  Args:
    lengths: [N, 2].
    num_shapes: K, at most.

  Returns:
    [K, 2] shapes, by their sum; fewer if more would save nothing.

  Example:
    >>> choose_shapes(np.array([[3, 3], [3, 4], [9, 9]]), 2)
    array([[3, 4],
           [9, 9]])
  """
  sides = [_spread(np.unique(side), _CANDIDATES) for side in lengths.T]
  candidates = np.stack(np.meshgrid(*sides), -1).reshape(-1, 2)
  # Lengths between two candidates fit what the larger one fits.
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
  """Returns how many rows a batch of each shape has.

  Args:
    shapes: [K, 2].
    size: of a batch, in units.
    unit: "examples", or "tokens" of the longer side, padding included.
    multiple: of which each number of rows has to be one, so that devices and
      accumulated parts get the same share.

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
  """Returns the first shape that holds each example.

  Args:
    lengths: [N, 2].
    shapes: [K, 2]; the last one holds everything.

  Returns:
    [N] indices.

  Example:
    >>> assign(np.array([[3, 4], [2, 5]]), np.array([[3, 4], [9, 9]]))
    array([0, 1])
  """
  return (lengths[:, None] <= shapes[None]).all(-1).argmax(1)


def plan_epoch(
  lengths: np.ndarray,
  shapes: np.ndarray,
  sizes: np.ndarray,
  left: np.ndarray,
  rng: np.random.Generator,
) -> EpochPlan:
  """Deals all examples into full batches, in random order.

  Examples that do not fill a batch of their shape wait for the next epoch.

  Args:
    lengths: [N, 2].
    shapes: [K, 2]; the last one holds everything.
    sizes: [K] rows of a batch.
    left: indices of examples that the epoch before left.
    rng: decides who shares a batch, and the order of batches.

  Returns:
    The batches: each example once, and those left before once more, but for
    those that are left now.

  Example:
    >>> lengths = np.array([[3, 4], [2, 5], [1, 1]])
    >>> plan = plan_epoch(
    ...   lengths, np.array([[3, 4], [9, 9]]), np.array([2, 2]),
    ...   np.array([], int), np.random.default_rng(0),
    ... )
    >>> [sorted(members.tolist()) for members in plan.members], plan.left
    ([[0, 2]], array([1]))
  """
  pool = np.concatenate([left, rng.permutation(len(lengths))])
  place = assign(lengths[pool], shapes)
  batches: list[tuple[int, np.ndarray]] = []
  waiting = []
  for index, size in enumerate(sizes):
    here = pool[place == index]
    full = len(here) // size * size
    batches += [(index, rows) for rows in here[:full].reshape(-1, size)]
    waiting.append(here[full:])
  shuffled = rng.permutation(len(batches))
  return EpochPlan(
    np.array([batches[i][0] for i in shuffled], int),
    [batches[i][1] for i in shuffled],
    np.concatenate(waiting),
  )


def _spread(values: np.ndarray, count: int) -> np.ndarray:
  """At most `count` of sorted values, evenly spread, the last among them."""
  picks = np.linspace(0, len(values) - 1, min(count, len(values)))
  return values[picks.round().astype(int)]
