"""One step of the recurrent decoder, as pure functions.

Axes: B batch, S source, T target, N hidden, C context, Q query, G gates, V
vocabulary. The attentional state has R features: N, or C + N.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

import attention
from attention.dispatch import ImplementationLike
from attention.normalizers import Normalizer
from attention.scores import Score, local, with_mapped_keys
from experiments.config import Seq2SeqConfig
from experiments.models.layers.affine import Affine
from experiments.models.rnn import cells


class Memory(NamedTuple):
  """The encoder's result, constant during decoding."""

  keys: jax.Array  # [B, S, ...] encoder states, already mapped by the score
  values: jax.Array  # [B, S, C] encoder states
  mask: jax.Array  # [B, 1, S], False at padding
  summary: jax.Array  # [B, C], the fixed context vector


class BoundAttention(NamedTuple):
  """The score and the normalizer, with their parameters."""

  score: Score
  normalizer: Normalizer


class DecoderWeights(NamedTuple):
  """The decoder's weights, in the dtype of the computation."""

  cells: tuple[cells.CellWeights, ...]  # of each layer
  # Input weights of the first cell for the context and the attentional state.
  fed: jax.Array
  attention: BoundAttention | None  # None for a fixed context vector
  combine: Affine | None  # W_c [C + N, N] and b_c [N]; None if linear
  output: Affine  # W_y [R, V] and b_y [V]


class Carry(NamedTuple):
  """The decoder's state before a step."""

  states: tuple[cells.State, ...]  # of each layer
  attentional: jax.Array  # [B, R]
  position: jax.Array  # int32 [], the number of steps before


def attention_context(
  bound: BoundAttention | None,
  memory: Memory,
  query: jax.Array,
  start,
  implementation: ImplementationLike = None,
) -> jax.Array:
  """Returns the contexts [B, T, C] of queries [B, T, Q] from `start`."""
  if bound is None:
    fixed = memory.summary[:, None, :]
    return jnp.broadcast_to(fixed, (*query.shape[:2], fixed.shape[-1]))
  # See Bahdanau et al., 2014, equations 5, 6 (https://arxiv.org/abs/1409.0473).
  return attention.attend(
    query,
    memory.keys,
    memory.values,
    score=_score_at(bound.score, memory, start),
    normalizer=bound.normalizer,
    mask=memory.mask,
    implementation=implementation,
  )


def attention_weights(
  bound: BoundAttention | None, memory: Memory, query: jax.Array, start
) -> jax.Array:
  """Returns the weights [B, T, S] of queries [B, T, Q] from `start`."""
  if bound is None:
    return jnp.zeros((*query.shape[:2], memory.values.shape[1]), jnp.float32)
  return attention.attention_weights(
    query,
    memory.keys,
    score=_score_at(bound.score, memory, start),
    normalizer=bound.normalizer,
    mask=memory.mask,
  )


def _score_at(score: Score, memory: Memory, start) -> Score:
  """Returns the score of mapped keys, for queries from position `start`."""
  if isinstance(score, local):
    # local_p predicts a position within the source without its padding.
    lengths = jnp.sum(memory.mask, -1)[:, 0].astype(jnp.float32)
    score = dataclasses.replace(score, length=lengths)
  return with_mapped_keys(score).shifted(start)


def attentional_state(
  weights: DecoderWeights, context: jax.Array, output: jax.Array
) -> jax.Array:
  """Returns the attentional state [..., R]."""
  joined = jnp.concatenate([context, output], -1)
  if weights.combine is None:
    return joined
  # See Luong et al., 2015, equation 5 (https://arxiv.org/abs/1508.04025).
  return jnp.tanh(weights.combine(joined))


def attention_query(
  config: Seq2SeqConfig, states: tuple[cells.State, ...]
) -> jax.Array:
  """Returns the query [B, Q]: the top layer's output, or all states."""
  if config.query == "output":
    return states[-1][0]
  return jnp.concatenate([part for state in states for part in state], -1)


def advance_cells(
  config: Seq2SeqConfig,
  weights: DecoderWeights,
  states: tuple[cells.State, ...],
  gates: jax.Array,
) -> tuple[cells.State, ...]:
  """Runs the layers of cells for one step from gates [B, G] of the first."""
  cell = cells.CELLS[config.cell]
  following: list[cells.State] = []
  for layer, (cell_weights, state) in enumerate(zip(weights.cells, states)):
    if layer:
      gates = cells.project(cell_weights, following[-1][0])
    following.append(cell.step(cell_weights.recurrent, gates, state))
  return tuple(following)


def step(
  config: Seq2SeqConfig,
  weights: DecoderWeights,
  memory: Memory,
  carry: Carry,
  gates: jax.Array,
) -> tuple[Carry, jax.Array]:
  """Runs one step from gates [B, G], the projected embedding."""

  def attend(states):
    query = attention_query(config, states)[:, None]
    return query, attention_context(
      weights.attention, memory, query, carry.position
    )[:, 0]

  fed = []
  # See Bahdanau et al., 2014, appendix A.2.2 (https://arxiv.org/abs/1409.0473).
  if config.order == "bahdanau":
    query, context = attend(carry.states)
    fed.append(context)
  if config.input_feeding:
    fed.append(carry.attentional)
  if fed:
    gates = gates + jnp.concatenate(fed, -1) @ weights.fed
  states = advance_cells(config, weights, carry.states, gates)
  # See Luong et al., 2015, sections 3 and 3.3, also for input feeding.
  if config.order == "luong":
    query, context = attend(states)
  attentional = attentional_state(weights, context, states[-1][0])
  return Carry(states, attentional, carry.position + 1), query
