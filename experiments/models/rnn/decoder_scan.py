"""The recurrent decoder over a whole target.

If the cell does not read contexts (Luong's order without input feeding), all
steps attend at once, after the loop over the cells.

Axes: B batch, S source, T target, X embedding, R attentional state, F inputs
of the first cell besides the embedding, G gates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.models.rnn import decoder, scan
from experiments.models.rnn.attention_step import Memory, attention_context
from experiments.models.rnn.cells import CellWeights, project


def scan_decoder(
  wiring: decoder.Wiring,
  weights: decoder.DecoderWeights,
  memory: Memory,
  carry: decoder.Carry,
  embeddings: jax.Array,
) -> jax.Array:
  """Returns the attentional states [B, T, R] of shifted embeddings."""
  gates = jnp.swapaxes(project(weights.cells[0], embeddings), 0, 1)
  if wiring.order == "bahdanau" or wiring.input_feeding:

    def attend_step(matrices, others, carry, gates):
      weights, memory = others
      weights = _replaced(weights, matrices)
      carry, _ = decoder.step(wiring, weights, memory, carry, gates)
      return carry, carry.attentional

    matrices = _cell_matrices(weights)._replace(
      fed=weights.fed, combine=weights.combine and weights.combine.kernel
    )
    _, attentional = scan.scan(
      attend_step, matrices, (weights, memory), carry, gates
    )
    return jnp.swapaxes(attentional, 0, 1)

  def cell_step(matrices, weights, states, gates):
    weights = _replaced(weights, matrices)
    states = decoder.advance_cells(wiring, weights, states, gates)
    return states, (states[-1][0], decoder.attention_query(wiring, states))

  _, steps = scan.scan(
    cell_step, _cell_matrices(weights), weights, carry.states, gates
  )
  outputs, queries = (jnp.swapaxes(each, 0, 1) for each in steps)
  contexts = attention_context(weights.score, memory, queries)
  return decoder.attentional_state(weights, contexts, outputs)


class _Matrices(NamedTuple):
  """The matrices that a step multiplies by; None for unused ones."""

  inputs: tuple[jax.Array, ...]  # Of the layers above the first.
  recurrent: tuple[jax.Array, ...]
  fed: jax.Array | None = None
  combine: jax.Array | None = None


def _cell_matrices(weights: decoder.DecoderWeights) -> _Matrices:
  return _Matrices(
    tuple(cell.input for cell in weights.cells[1:]),
    tuple(cell.recurrent for cell in weights.cells),
  )


def _replaced(
  weights: decoder.DecoderWeights, matrices: _Matrices
) -> decoder.DecoderWeights:
  """Returns the weights with these matrices in place of their own."""
  first = weights.cells[0]
  cells = zip(
    (first.input, *matrices.inputs), matrices.recurrent, weights.cells
  )
  combine = weights.combine
  if combine is not None and matrices.combine is not None:
    combine = combine._replace(kernel=matrices.combine)
  return weights._replace(
    cells=tuple(
      CellWeights(input, own, cell.bias) for input, own, cell in cells
    ),
    fed=weights.fed if matrices.fed is None else matrices.fed,
    combine=combine,
  )
