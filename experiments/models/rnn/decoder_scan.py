"""The recurrent decoder over a whole target."""

from typing import Any

import jax
import jax.numpy as jnp

from attention.dispatch import ImplementationLike
from experiments.config import Seq2SeqConfig
from experiments.models.rnn import decoder, scan
from experiments.models.rnn.cells import project


def scan_decoder(
  config: Seq2SeqConfig,
  weights: decoder.DecoderWeights,
  memory: decoder.Memory,
  carry: decoder.Carry,
  embeddings: jax.Array,
  implementation: ImplementationLike,
) -> jax.Array:
  """Returns the attentional states [B, T, R] of embeddings [B, T, X].

  The implementation is that of attention at all steps at once.
  """
  gates = jnp.swapaxes(project(weights.cells[0], embeddings), 0, 1)
  if not config.attends_at_once:
    return _attend_by_steps(config, weights, memory, carry, gates)

  # The cells read no contexts, so all steps attend at once, after the loop.
  def cell_step(matrices, weights, states, gates):
    weights = _combined(matrices, weights)
    states = decoder.advance_cells(config, weights, states, gates)
    return states, (states[-1][0], decoder.attention_query(config, states))

  _, steps = scan.scan(
    cell_step, _cell_matrices(weights), weights, carry.states, gates
  )
  outputs, queries = (jnp.swapaxes(each, 0, 1) for each in steps)
  contexts = decoder.attention_context(
    weights.attention,
    memory,
    queries,
    carry.position,
    implementation,
  )
  return decoder.attentional_state(weights, contexts, outputs)


def _attend_by_steps(
  config: Seq2SeqConfig,
  weights: decoder.DecoderWeights,
  memory: decoder.Memory,
  carry: decoder.Carry,
  gates: jax.Array,  # [T, B, G]
) -> jax.Array:
  def step(matrices, others, carry, gates):
    weights, memory = others
    weights = _combined(matrices, weights)
    carry, _ = decoder.step(config, weights, memory, carry, gates)
    return carry, carry.attentional

  combine = weights.combine and weights.combine._replace(bias=None)
  matrices = _cell_matrices(weights)._replace(fed=weights.fed, combine=combine)
  _, attentional = scan.scan(step, matrices, (weights, memory), carry, gates)
  return jnp.swapaxes(attentional, 0, 1)


def _cell_matrices(weights: decoder.DecoderWeights) -> decoder.DecoderWeights:
  """The matrices that the cells multiply by in each step; None elsewhere."""
  none: Any = None
  first, *others = (cell._replace(bias=none) for cell in weights.cells)
  cells = (first._replace(input=none), *others)
  return decoder.DecoderWeights(cells, none, None, None, none)


def _combined(
  matrices: decoder.DecoderWeights, weights: decoder.DecoderWeights
) -> decoder.DecoderWeights:
  """Returns the matrices, and the weights where these are None."""
  return jax.tree.map(
    lambda matrix, weight: weight if matrix is None else matrix,
    matrices,
    weights,
    is_leaf=lambda leaf: leaf is None,
  )
