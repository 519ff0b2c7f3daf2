"""Attention over a sequence that is sharded over several devices.

Keys and values rotate around the ring of devices, and the results for the
shards are merged by the statistics of their rows: see docs/design.md.
"""

from collections.abc import Callable
from typing import Annotated as Shaped
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from attention.arrays import axes
from attention.arrays.matmul import matmul_precision
from attention.arrays.softmax import Statistics, with_sink
from attention.biases.types import as_bias, with_numbers_by_distance
from attention.checks import check_shape, check_tokens
from attention.dispatch import (
  ImplementationLike,
  dispatch,
  dispatch_statistics,
)
from attention.dropout import Dropout, PartDropout, make_dropout
from attention.masks.types import Band, as_mask
from attention.normalizers import as_normalizer, is_softmax, softmax
from attention.positional.base import FULL
from attention.ring.layout import (
  Ring,
  ShardLayout,
  block_visibility,
  may_have_gradient,
)
from attention.ring.order import Order
from attention.ring.pair_step import make_pair_steps
from attention.ring.rotation import make_rotation
from attention.scores import Score, as_score, scaled_dot_score
from attention.scores.decay import with_running_sums
from attention.types import (
  BiasLike,
  ContextAndLse,
  MaskLike,
  NormalizerLike,
  ScoreLike,
)


def ring_attention(
  query: Shaped[jax.Array, "... T/n Dq"],
  key: Shaped[jax.Array, "... S/n Dk"],
  value: Shaped[jax.Array, "... S/n E"],
  *,
  axis_name: str,
  score: ScoreLike = scaled_dot_score,
  mask: MaskLike | None = None,
  bias: BiasLike | None = None,
  normalizer: NormalizerLike | None = None,
  dropout_rate: float = 0.0,
  rng: jax.Array | None = None,
  order: Order = "contiguous",
  implementation: ImplementationLike = None,
  return_lse: bool = False,
  precision: PrecisionLike = None,
) -> ContextAndLse:
  """`attend` for a sequence that is sharded over the devices of a mesh axis.

  Call it inside `jax.shard_map`, with this device's shard of the tokens (or, on
  one device, inside `jax.vmap` with a named axis of shards). Keys and values
  rotate around the ring of devices. See "Ring Attention with Blockwise
  Transformers for Near-Infinite Context", Liu et al., 2023, section 3
  (https://arxiv.org/abs/2310.01889). Derivatives of every order exist, in
  forward and reverse mode.

  Args:
    query: [..., T / n, Dq], the shard of one of n devices.
    key: [..., S / n, Dk]; leading axes as in `attend`.
    value: [..., S / n, E].
    axis_name: the mesh axis over which tokens are sharded.
    score: as in `attend`.
    mask: as in `attend`, for all T x S pairs, in the order of the sequence,
      whatever the layout of the shards. Blocks that the mask hides entirely
      are skipped if this is known when tracing.
    bias: as in `attend`, for all T x S pairs, in the order of the sequence.
    normalizer: softmax or sigmoid from `attention.normalizers`, or another one
      with `is_elementwise = True`; None is softmax. Other normalizers need all
      keys of a query at once.
    dropout_rate: as in `attend`; it drops the same weights as on one device.
    rng: a random key, the same on all devices.
    order: "contiguous", if shard d holds the d-th part of the sequence, or
      "zigzag", if `arrange(..., order="zigzag")` has permuted the sequence; in
      zigzag order a causal mask gives all devices the same work.
    implementation: as in `attend`, for each pair of blocks.
    return_lse: as in `attend`.
    precision: as in `attend`.

  Returns:
    The context [..., T / n, E] in the query's dtype; with `return_lse` a pair
    of the context and the lse [..., T / n].

  Raises:
    AssertionError: as in `attend`.
    NotImplementedError: for other normalizers.
    TypeError: as in `attend`.
    ValueError: as in `attend`; or if a shard has an odd number of tokens in
      zigzag order, the order is unknown, or the score is a plain function that
      closes over arrays which need gradients.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import masks
    >>> mesh = jax.make_mesh((2,), ("sequence",))  # two devices
    >>> shard = jax.P("sequence")
    >>> def self_attention(tokens):
    ...   return ring_attention(
    ...     tokens, tokens, tokens, axis_name="sequence", mask=masks.causal()
    ...   )
    >>> self_attention = jax.jit(
    ...   jax.shard_map(
    ...     self_attention, mesh=mesh, in_specs=shard, out_specs=shard
    ...   )
    ... )
    >>> self_attention(
    ...   jax.device_put(jnp.eye(2), jax.NamedSharding(mesh, shard))
    ... )
    Array([[1.  , 0.  ],
           [0.33, 0.67]], dtype=float32)
  """
  with matmul_precision(precision):
    context, lse = ring_dispatch(
      query,
      key,
      value,
      axis_name=axis_name,
      score=score,
      mask=mask,
      bias=bias,
      normalizer=normalizer,
      dropout=make_dropout(dropout_rate, rng),
      order=order,
      implementation=implementation,
      return_lse=return_lse,
    )
  return (context, lse) if return_lse else context


def ring_dispatch(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  axis_name: str,
  score: Score | Callable,
  mask: Any,
  bias: Any,
  normalizer: Callable | None,
  dropout: Dropout | None,
  order: Order,
  implementation: ImplementationLike,
  return_lse: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """`ring_attention` with the arguments and results of `dispatch`."""
  normalizer = _checked(as_normalizer(normalizer), return_lse)
  check_tokens(query=query, key=key, value=value)
  length = key.shape[-2]
  check_shape("value", value, length=length, features=None, fits="key")
  queries, keys = (
    ShardLayout.of(name, tokens.shape[-2], order)
    for name, tokens in (("query", query), ("key", key))
  )
  size = _axis_size(axis_name)
  ring = Ring(axis_name, size, order, queries, keys)
  mask = mask if mask is None else as_mask(mask)
  bias = bias if bias is None else with_numbers_by_distance(as_bias(bias))
  lengths = query.shape[-2] * size, key.shape[-2] * size
  for pairs in (mask, bias):
    if pairs is not None:
      pairs.check(*lengths)
  if 0 in lengths:  # no pair
    return ring.varying(
      dispatch(
        query,
        key,
        value,
        score=score,
        normalizer=normalizer,
        return_lse=return_lse,
      )
    )
  rows, features = query.shape[-2], value.shape[-1]
  if not features:
    value = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, 1)])
  visible = block_visibility(mask, ring)
  sink = getattr(normalizer, "sink", None)
  plain = normalizer if sink is None else softmax()
  score = with_running_sums(as_score(score))
  score, mask, bias, plain = ring.varying((score, mask, bias, plain))
  query, key, value, score, mask, bias, plain = _varying_alike(
    (query, key, value, score, mask, bias, plain)
  )
  pair = _make_pair(
    ring, lengths, score, mask, bias, plain, dropout, implementation
  )
  blocks = queries.blocks(query), keys.blocks(key), keys.blocks(value)
  steps, parameters, constants = make_pair_steps(ring, visible, pair, blocks)
  rotate = make_rotation(ring, steps)
  context, *statistics = rotate(parameters, constants, *blocks)
  context = context.reshape(*context.shape[:-4], rows, context.shape[-1])
  statistics = Statistics(*(x.reshape(*x.shape[:-4], rows) for x in statistics))
  if not is_softmax(normalizer):
    # The rotation averages over the parts that `statistics.total` counts.
    context = context * statistics.total[..., None]
  if sink is not None:
    context, statistics = with_sink(context, statistics, sink)
  context = context[..., :features].astype(query.dtype)
  return context, statistics.lse if return_lse else None


def _varying_alike(tree: Any) -> Any:
  """The arrays; those with gradients vary over the mesh axes of them all."""
  # Tangents have the types of their arrays then; see `with_transpose`.
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]

  def vary(leaf):
    if not may_have_gradient(leaf):
      return leaf
    return axes.varying_like(arrays, [leaf])[0]

  return jax.tree.map(vary, tree)


def _axis_size(axis_name: str) -> int:
  """The number of devices of the ring."""
  try:
    return jax.lax.axis_size(axis_name)
  except NameError as error:
    raise ValueError(
      f"axis_name={axis_name!r} is no axis of a mesh here: call ring_attention "
      "inside jax.shard_map over this axis"
    ) from error


def _checked(normalizer: Callable, return_lse: bool) -> Callable:
  """The normalizer, if results over disjoint sets of keys can be merged."""
  if is_softmax(normalizer):
    return normalizer
  if return_lse:
    raise NotImplementedError(
      f"only softmax has a log-sum-exp: return_lse=True got {normalizer!r}"
    )
  if not getattr(normalizer, "is_elementwise", False):
    raise NotImplementedError(
      f"ring_attention cannot merge the results of {normalizer!r} for parts "
      "of the keys; it supports normalizers.softmax, normalizers.sigmoid and "
      "others with is_elementwise = True"
    )
  return normalizer


def _make_pair(
  ring: Ring, lengths, score, mask, bias, normalizer, dropout, implementation
) -> Callable:
  """(case, query, key, value, row, column, *combined) -> the block's result."""

  def pair(case, query, key, value, row, column, *combined):
    start = row * ring.queries.size, column * ring.keys.size
    visible = mask
    if mask is not None:
      # With a mask, a non-finite token affects only the rows that attend to it,
      # so a mask is passed even if it hides nothing in this pair of blocks.
      full = case == FULL
      visible = Band(None, None) if full else mask.placed(*start)
    context, statistics = dispatch_statistics(
      query,
      key,
      value,
      score=score.placed(*start, key_length=lengths[1]),
      mask=visible,
      bias=bias if bias is None else bias.placed(*start),
      normalizer=normalizer,
      dropout=dropout
      if dropout is None
      else PartDropout(dropout, *start, lengths),
      implementation=implementation,
      return_lse=True,
      combined=combined or None,
    )
    if statistics is None:
      raise TypeError(f"implementation={implementation!r} returned no lse")
    return context.astype(statistics.total.dtype), statistics

  return pair
