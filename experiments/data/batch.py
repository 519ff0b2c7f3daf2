"""A batch of token sequences, and the special token ids."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PAD, BOS, EOS = 0, 1, 2
UNK = 3  # of text only: the symbols of synthetic tasks begin here
NUM_SPECIAL = 3

Array = jax.Array | np.ndarray


class Batch(NamedTuple):
  """Pairs of token sequences, each ended by EOS and padded with PAD."""

  source: Array  # [B, S] int32
  target: Array  # [B, T] int32


class BatchShape(NamedTuple):
  """The shape of a batch over all devices."""

  rows: int
  source: int  # tokens of a source
  target: int


def append_eos(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Puts EOS after `lengths` [B] tokens of [B, L] rows, and PAD after it."""
  tokens = np.pad(tokens, ((0, 0), (0, 1)))
  position = np.arange(tokens.shape[1])
  tokens = np.where(position < lengths[:, None], tokens, PAD)
  return np.where(position == lengths[:, None], EOS, tokens).astype(np.int32)


def shift_right(target: jax.Array) -> jax.Array:
  """Returns the decoder's inputs [B, T]: BOS, then all targets but the last."""
  return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)


def strip(tokens: np.ndarray) -> np.ndarray:
  """Returns the tokens [L] before the first EOS or PAD."""
  ends = np.flatnonzero((tokens == EOS) | (tokens == PAD))
  return tokens[: ends[0]] if ends.size else tokens
