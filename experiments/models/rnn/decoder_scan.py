"""The recurrent decoder over a whole target.

Where the look-back feeds nothing back into the cell (Luong's order without
input feeding), all steps look back at once.

Axes: B batch, S source, T target, X embedding, R attentional state, F what is
fed back, G gates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.models.rnn import decoder, scan
from experiments.models.rnn.attention_step import Memory, look_back
from experiments.models.rnn.cells import CellWeights


def unroll(
  wiring: decoder.Wiring,
  weights: decoder.DecoderWeights,
  memory: Memory,
  carry: decoder.Carry,
  embeddings: jax.Array,
) -> jax.Array:
  """Runs the decoder over a known target.

  Args:
    wiring: which parts are joined.
    weights: the decoder's.
    memory: the encoder's states.
    carry: where to start.
    embeddings: [B, T, X] of the target, one step late.

  Returns:
    [B, T, R] attentional states.

  Example:
    >>> from experiments.models.layers.affine import Affine
    >>> cell = CellWeights(
    ...   jnp.ones((3, 6)), jnp.ones((2, 6)), jnp.ones(6)
    ... )
    >>> fed, output = jnp.ones((0, 6)), Affine(jnp.ones((4, 5)), jnp.ones(5))
    >>> weights = decoder.DecoderWeights((cell,), fed, None, None, output)
    >>> keys, mask = jnp.ones((1, 3, 2)), jnp.ones((1, 1, 3), bool)
    >>> memory = Memory(keys, keys, mask, keys[:, 0])
    >>> carry = decoder.Carry(((jnp.ones((1, 2)),),), jnp.ones((1, 4)))
    >>> wiring = decoder.Wiring(readout="linear")
    >>> embeddings = jnp.ones((1, 7, 3))
    >>> unroll(wiring, weights, memory, carry, embeddings).shape
    (1, 7, 4)
  """
  gates = jnp.swapaxes(decoder.project_embeddings(weights, embeddings), 0, 1)
  if wiring.feeds_back:

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
    states = decoder.advance(wiring, weights, states, gates)
    return states, (states[-1][0], decoder.query_of(wiring, states))

  _, steps = scan.scan(
    cell_step, _cell_matrices(weights), weights, carry.states, gates
  )
  outputs, queries = (jnp.swapaxes(each, 0, 1) for each in steps)
  contexts = look_back(weights.score, memory, queries)
  return decoder.read_out(weights, contexts, outputs)


class _Matrices(NamedTuple):
  """What a step multiplies by; None for what it does not."""

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
  """The weights, with these matrices in place of their own."""
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
