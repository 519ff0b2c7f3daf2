"""Constructors of biases: ALiBi, and T5's relative positions."""

from typing import Annotated as Shaped

import chex
import jax
import jax.numpy as jnp

from attention.biases.types import Alibi, Bias, ByBucket
from attention.checks import check_floating, check_integers, check_positive


def alibi(num_heads: int) -> Bias:
  """Attention with linear biases, `-slope[h] * |i - j|`.

  See "Train Short, Test Long", Press et al., 2021, section 3
  (https://arxiv.org/abs/2108.12409).

  Args:
    num_heads: H; the scores must be [..., H, T, S].

  Returns:
    A bias.

  Raises:
    ValueError: if there is not at least one head.

  Example:
    >>> alibi(8).materialize(1, 3)[0]
    Array([[-0. , -0.5, -1. ]], dtype=float32)
  """
  check_integers(num_heads=num_heads)
  check_positive(num_heads=num_heads)
  return Alibi(num_heads)


def relative_position(
  table: Shaped[jax.Array, "buckets H"],
  bidirectional: bool = True,
  max_distance: int = 128,
) -> Bias:
  """T5's relative position bias, one learned number per bucket of distances.

  Half of the buckets contain one distance each; the sizes of the others grow
  logarithmically up to `max_distance`. See "Exploring the Limits of Transfer
  Learning with a Unified Text-to-Text Transformer", Raffel et al., 2019,
  section 2.1 (https://arxiv.org/abs/1910.10683).

  Args:
    table: [num_buckets, H].
    bidirectional: whether keys after the query have buckets of their own;
      otherwise they share the bucket of distance 0.
    max_distance: this distance and all larger ones share the last bucket.

  Returns:
    A bias for scores [..., H, T, S], differentiable in `table`.

  Raises:
    AssertionError: if `table` is not a floating-point matrix.
    ValueError: if the buckets do not fit the distances.

  Example:
    >>> import jax.numpy as jnp
    >>> table = jnp.arange(8.0)[:, None]
    >>> relative_position(table).materialize(1, 4)[0]
    Array([[0., 5., 6., 6.]], dtype=float32)
  """
  chex.assert_rank(
    table, 2, custom_message="table must be [num_buckets, heads]"
  )
  check_floating(table=table)
  num_buckets = table.shape[0]
  exact = num_buckets // (4 if bidirectional else 2)
  check_integers(max_distance=max_distance)
  if exact < 1 or max_distance <= exact:
    raise ValueError(
      f"table has {num_buckets} buckets, {exact} of them for single distances; "
      f"there must be at least 1, and fewer than max_distance={max_distance}"
    )
  return ByBucket(jnp.asarray(table).T, bidirectional, max_distance)
