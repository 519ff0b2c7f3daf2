"""Synthetic tasks, drawn from (seed, step) and never stored.

Axes: N examples, L the longest length drawn, S source and T target tokens.
"""

import numpy as np

from experiments.config import LengthRange, TaskConfig
from experiments.data import batch as batch_lib
from experiments.data.batch import NUM_SPECIAL, PAD, Batch
from experiments.errors import UserError

HELD_OUT_SHARE = 1 / 16
_MAX_DRAWS = 1000
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def copy(
  rng: np.random.Generator, lengths: np.ndarray, width: int, symbols: int
) -> Batch:
  """Draws sequences of symbols; each target is its source.

  Args:
    rng: NumPy generator.
    lengths: [N] number of symbols of each source.
    width: L, at least the largest length.
    symbols: number of different symbols.

  Returns:
    Sources [N, L + 1] and targets [N, L + 1].

  Example:
    >>> batch = copy(np.random.default_rng(0), np.array([3]), 3, symbols=10)
    >>> bool((batch.source == batch.target).all())
    True
  """
  tokens = NUM_SPECIAL + rng.integers(symbols, size=(len(lengths), width))
  source = batch_lib.append_eos(tokens, lengths)
  return Batch(source, source)


def reverse(
  rng: np.random.Generator, lengths: np.ndarray, width: int, symbols: int
) -> Batch:
  """Draws sequences of symbols; each target is its source backwards.

  Args:
    rng: NumPy generator.
    lengths: [N] number of symbols of each source.
    width: L, at least the largest length.
    symbols: number of different symbols.

  Returns:
    Sources [N, L + 1] and targets [N, L + 1].

  Example:
    >>> batch = reverse(np.random.default_rng(0), np.array([3]), 4, symbols=10)
    >>> bool((batch.source[0, :3] == batch.target[0, 2::-1]).all())
    True
  """
  source = copy(rng, lengths, width, symbols).source
  mirrored = np.maximum(lengths[:, None] - 1 - np.arange(width), 0)
  backwards = np.take_along_axis(source, mirrored, axis=1)
  return Batch(source, batch_lib.append_eos(backwards, lengths))


def lookup(
  rng: np.random.Generator, lengths: np.ndarray, width: int, symbols: int
) -> Batch:
  """Draws `k_1 v_1 ... k_n v_n q`; each target is the value of the key q.

  The keys k_i are distinct; keys and values are different symbols.

  Args:
    rng: NumPy generator.
    lengths: [N], n of each source, at most `symbols`.
    width: L, at least the largest length.
    symbols: number of different keys, and of different values.

  Returns:
    Sources [N, 2 * L + 2] and targets [N, 2].

  Example:
    >>> batch = lookup(np.random.default_rng(0), np.array([2]), 2, symbols=10)
    >>> k1, v1, k2, v2, query, end = batch.source[0].tolist()
    >>> {k1: v1, k2: v2}[query] == int(batch.target[0, 0])
    True
  """
  shape = (len(lengths), symbols)
  keys = rng.permuted(np.broadcast_to(np.arange(symbols), shape), axis=1)
  values = symbols + rng.integers(symbols, size=(len(lengths), width))
  chosen = rng.integers(lengths)[:, None]
  pairs = np.stack([keys[:, :width], values], axis=2)
  source = np.pad(pairs.reshape(len(lengths), -1), ((0, 0), (0, 1)))
  query = np.take_along_axis(keys, chosen, axis=1)
  np.put_along_axis(source, 2 * lengths[:, None], query, axis=1)
  target = np.take_along_axis(values, chosen, axis=1)
  return Batch(
    batch_lib.append_eos(NUM_SPECIAL + source, 2 * lengths + 1),
    batch_lib.append_eos(NUM_SPECIAL + target, np.ones_like(lengths)),
  )


DRAW = {"copy": copy, "reverse": reverse, "lookup": lookup}


def held_out(source: np.ndarray) -> np.ndarray:
  """Returns [N] bool, by a hash: whether sources [N, S] are for evaluation."""
  state = np.zeros(len(source), np.uint64)
  for token in source.astype(np.uint64).T:
    mixed = (state ^ token) * _HASH_FACTOR
    mixed ^= mixed >> np.uint64(29)
    state = np.where(token == PAD, state, mixed)
  return state < np.uint64(int(HELD_OUT_SHARE * 2**64))


def batch_lengths(name: str, width: int) -> tuple[int, int]:
  """Returns S and T, EOS included, for sequences padded to a width."""
  return (2 * width + 2, 2) if name == "lookup" else (width + 1, width + 1)


def draw(
  config: TaskConfig,
  rng: np.random.Generator,
  lengths: TaskConfig | LengthRange,
  *,
  size: int,
  width: int,
  held_out_only: bool,
) -> Batch:
  """Draws N = `size` examples; all of their sources are held out, or none."""
  shortest, longest = lengths.min_length, lengths.max_length

  def drawn(count: int) -> Batch:
    each = rng.integers(shortest, longest + 1, size=count)
    return DRAW[config.name](rng, each, width, config.symbols)

  examples = drawn(size)
  for _ in range(_MAX_DRAWS):
    # Examples of the other kind are drawn again.
    is_held_out = held_out(np.asarray(examples.source))
    missing = np.flatnonzero(is_held_out != held_out_only)
    if not missing.size:
      return examples
    for kept, new in zip(examples, drawn(missing.size)):
      kept[missing] = new
  raise UserError(
    f"config.data: {config.name} with {config.symbols} symbols and lengths "
    f"{shortest} to {longest} has too few different sequences to keep training"
    " and evaluation apart; raise symbols or max_length"
  )
