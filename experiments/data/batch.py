"""What a model reads: padded token ids, and the ids that mean something."""

from typing import NamedTuple

import jax
import numpy as np

PAD, BOS, EOS = 0, 1, 2
UNK = 3  # of text; synthetic tasks begin their symbols here
NUM_SPECIAL = 3

Array = jax.Array | np.ndarray


class Batch(NamedTuple):
  """Pairs of token sequences, each ended by EOS and padded with PAD.

  Attributes:
    source: [B, S] int32.
    target: [B, T] int32.
  """

  source: Array
  target: Array


def terminate(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Ends every row with EOS after its length, and pads what follows.

  Args:
    tokens: [B, L] token ids; what stands beyond a row's length is ignored.
    lengths: [B] integers, from 0 to L.

  Returns:
    [B, L + 1] int32.

  Example:
    >>> terminate(np.array([[5, 6, 7], [8, 9, 9]]), np.array([3, 1]))
    array([[5, 6, 7, 2],
           [8, 2, 0, 0]], dtype=int32)
  """
  tokens = np.pad(tokens, ((0, 0), (0, 1)))
  place = np.arange(tokens.shape[1])
  tokens = np.where(place < lengths[:, None], tokens, PAD)
  return np.where(place == lengths[:, None], EOS, tokens).astype(np.int32)


def strip(tokens: np.ndarray) -> np.ndarray:
  """Cuts one row of tokens before its first EOS (or PAD).

  Args:
    tokens: [L] integers.

  Returns:
    The tokens that mean something, without EOS.

  Example:
    >>> strip(np.array([5, 6, 2, 0]))
    array([5, 6])
  """
  ends = np.flatnonzero((tokens == EOS) | (tokens == PAD))
  return tokens[: ends[0]] if ends.size else tokens
