"""The order in which a kernel visits the tiles that a mask does not hide."""

import dataclasses
from typing import NamedTuple

import numpy as np

from attention.implementations.pallas.operands import Unsupported
from attention.positional.base import EMPTY, PARTIAL

# Flags of a visit: the first and the last of its row or column; whether the
# mask hides some pairs, or all.
FIRST, LAST, MASKED, HIDDEN = 1, 2, 4, 8
_FLAG_BITS, _BITS = 4, 13
_MOST = 1 << _BITS


class Visits(NamedTuple):
  """One entry per visit, int32 [P]."""

  rows: np.ndarray
  columns: np.ndarray
  # The index along leading axes that share keys or values, or the phase.
  groups: np.ndarray
  flags: np.ndarray

  def packed(self) -> list[np.ndarray]:
    """Arrays for a TPU's scalar memory: tiles with flags, and any groups."""
    most = max(self.rows.max(), self.columns.max()) + 1
    if most > _MOST:
      raise Unsupported(
        f"has at most {_MOST} tiles along an axis, got {most}; larger "
        "query_block and key_block make fewer"
      )
    tiles = self.rows << _BITS | self.columns
    tiles = tiles << _FLAG_BITS | self.flags
    return [tiles.astype(np.int32), *[self.groups] * bool(self.groups.any())]


def unpacked(tile):
  """The row, the column and the flags of a packed visit."""
  number = tile >> _FLAG_BITS
  return number >> _BITS, number & (_MOST - 1), tile & ((1 << _FLAG_BITS) - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Visibility:
  """The visibility of all tiles."""

  tiles: np.ndarray  # int8 [T / t, S / s] of EMPTY, PARTIAL and FULL

  @property
  def most_in_a_row(self) -> int:
    """The largest number of visible tiles of a row, 1 at least."""
    return max(1, int((self.tiles != EMPTY).sum(axis=1).max()))

  def by_rows(self, phases: int = 1) -> Visits:
    """Row by row, in each phase by phase.

    A row without a visible tile has a hidden visit in each.
    """
    return _visits(self.tiles, phases)

  def by_columns(self, groups: int) -> Visits:
    """Column by column, and in each group by group."""
    by_columns = _visits(self.tiles.T, groups)
    return by_columns._replace(rows=by_columns.columns, columns=by_columns.rows)

  def by_tiles(self, groups: int) -> Visits:
    """All tiles, each in all groups; hidden ones have one hidden visit."""
    entries: list[tuple[int, int, int, int]] = []
    for (row, column), kind in np.ndenumerate(self.tiles):
      number = 1 if kind == EMPTY else groups
      flags = np.full(number, {EMPTY: HIDDEN, PARTIAL: MASKED}.get(kind, 0))
      flags[0] |= FIRST
      flags[-1] |= LAST
      entries += [(row, column, *each) for each in enumerate(flags)]
    rows, columns, group, flags = np.asarray(entries, np.int32).T
    return Visits(rows, columns, group, flags)


def _visits(tiles: np.ndarray, groups: int) -> Visits:
  entries: list[tuple[int, int, int, int]] = []
  for row, kinds in enumerate(tiles):
    seen = np.flatnonzero(kinds != EMPTY)
    kind = np.where(kinds[seen] == PARTIAL, MASKED, 0)
    if not len(seen):
      seen, kind = np.zeros(1, int), np.full(1, HIDDEN)
    flags = np.tile(kind, groups)
    flags[0] |= FIRST
    flags[-1] |= LAST
    group = np.repeat(np.arange(groups), len(seen))
    entries += zip([row] * len(group), np.tile(seen, groups), group, flags)
  return Visits(*np.asarray(entries, np.int32).T)
