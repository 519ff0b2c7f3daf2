"""One step of the recurrent decoder, as pure functions.

It embeds the previous target token, looks back at the encoder states, and
reads out the attentional state that predicts the next token.

Axes: B batch, S source, T target, N hidden, C context, Q query, G gates, V
vocabulary. The attentional state has R features: N, or C + N.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from attention.scores import Score
from experiments.models.layers.affine import Affine
from experiments.models.rnn import cells
from experiments.models.rnn.attention_step import Memory, look_back


@dataclasses.dataclass(frozen=True)
class Wiring:
  """Which parts of a decoder are joined to which.

  Attributes:
    cell: "gru" or "lstm".
    order: "bahdanau" attends from s_{t-1}, before the cell, which reads the
      context; "luong" attends from s_t, after the cell.
    query: "output" of the top layer, or the whole "state" of all layers.
    readout: "tanh" joins context and output to tanh(W_c [a_t; s_t] + b_c);
      "linear" leaves them side by side.
    input_feeding: whether the cell also reads the last attentional state.

  Example:
    >>> Wiring(order="bahdanau").feeds_back, Wiring(order="luong").feeds_back
    (True, False)
  """

  cell: str = "gru"
  order: Literal["bahdanau", "luong"] = "luong"
  query: Literal["output", "state"] = "output"
  readout: Literal["tanh", "linear"] = "tanh"
  input_feeding: bool = False

  @property
  def feeds_back(self) -> bool:
    """Whether a step of the cell needs the look-back of an earlier one."""
    return self.order == "bahdanau" or self.input_feeding


class DecoderWeights(NamedTuple):
  """The decoder's weights, in the dtype of the computation.

  Attributes:
    cells: one `CellWeights` a layer; the first reads embeddings.
    fed: [F, G], by which the first cell also reads what is fed back to it; F
      is 0 if nothing is.
    score: the bound score, or None for a fixed context vector.
    combine: W_c [C + N, N] and b_c [N], or None for a linear readout.
    output: W_y [R, V] and b_y [V].
  """

  cells: tuple[cells.CellWeights, ...]
  fed: jax.Array
  score: Score | None
  combine: Affine | None
  output: Affine


class Carry(NamedTuple):
  """What one step hands to the next.

  Attributes:
    states: one cell state a layer.
    attentional: [B, R].
  """

  states: tuple[cells.State, ...]
  attentional: jax.Array


def read_out(
  weights: DecoderWeights, context: jax.Array, output: jax.Array
) -> jax.Array:
  """Returns the attentional state, which predicts the next token.

  See "Effective Approaches to Attention-based Neural Machine Translation",
  Luong et al., 2015, equation 5 (https://arxiv.org/abs/1508.04025).

  Args:
    weights: the decoder's.
    context: [..., C].
    output: [..., N] of the top layer.

  Returns:
    [..., R].

  Example:
    >>> output = Affine(jnp.ones((4, 5)), jnp.ones(5))
    >>> fed = jnp.ones((0, 6))
    >>> weights = DecoderWeights((), fed, None, None, output)
    >>> read_out(weights, jnp.ones((1, 2)), jnp.ones((1, 2))).shape
    (1, 4)
  """
  joined = jnp.concatenate([context, output], -1)
  if weights.combine is None:
    return joined
  return jnp.tanh(weights.combine(joined))


def query_of(wiring: Wiring, states: tuple[cells.State, ...]) -> jax.Array:
  """Returns what asks: the top layer's output, or all states side by side.

  Args:
    wiring: which of the two.
    states: one cell state a layer, [B, N] arrays.

  Returns:
    [B, Q].

  Example:
    >>> states = ((jnp.ones((1, 2)), jnp.ones((1, 2))),)
    >>> query_of(Wiring(cell="lstm", query="state"), states).shape
    (1, 4)
  """
  if wiring.query == "output":
    return states[-1][0]
  return jnp.concatenate([part for state in states for part in state], -1)


def advance(
  wiring: Wiring,
  weights: DecoderWeights,
  states: tuple[cells.State, ...],
  gates: jax.Array,
) -> tuple[cells.State, ...]:
  """Runs the stack of cells for one step.

  Args:
    wiring: the kind of cell.
    weights: the decoder's.
    states: one cell state a layer, [B, N] arrays.
    gates: [B, G] of the first layer.

  Returns:
    The new states, one a layer.

  Example:
    >>> cell = cells.CellWeights(
    ...   jnp.ones((3, 6)), jnp.ones((2, 6)), jnp.ones(6)
    ... )
    >>> output = Affine(jnp.ones((4, 5)), jnp.ones(5))
    >>> fed = jnp.ones((0, 6))
    >>> weights = DecoderWeights((cell,), fed, None, None, output)
    >>> states = ((jnp.ones((1, 2)),),)
    >>> ((hidden,),) = advance(Wiring(), weights, states, jnp.ones((1, 6)))
    >>> hidden.shape
    (1, 2)
  """
  cell = cells.CELLS[wiring.cell]
  following: list[cells.State] = []
  for layer, (cell_weights, state) in enumerate(zip(weights.cells, states)):
    if layer:
      gates = cells.project(cell_weights, following[-1][0])
    following.append(cell.step(cell_weights.recurrent, gates, state))
  return tuple(following)


def step(
  wiring: Wiring,
  weights: DecoderWeights,
  memory: Memory,
  carry: Carry,
  gates: jax.Array,
) -> tuple[Carry, jax.Array]:
  """One step of the decoder.

  See Bahdanau et al., 2014, appendix A.2.2 (https://arxiv.org/abs/1409.0473),
  for the order that attends first, and Luong et al., 2015, sections 3 and 3.3
  (https://arxiv.org/abs/1508.04025), for the other and for input feeding.

  Args:
    wiring: which parts are joined.
    weights: the decoder's.
    memory: what it looks back at.
    carry: what the last step left.
    gates: [B, G], the embedding of the last token, projected.

  Returns:
    What the next step needs, with this step's attentional state in it; and
    the query [B, Q] that looked back.

  Example:
    >>> cell = cells.CellWeights(
    ...   jnp.ones((3, 6)), jnp.ones((2, 6)), jnp.ones(6)
    ... )
    >>> output = Affine(jnp.ones((4, 5)), jnp.ones(5))
    >>> fed = jnp.ones((0, 6))
    >>> weights = DecoderWeights((cell,), fed, None, None, output)
    >>> keys = jnp.ones((1, 3, 2))
    >>> memory = Memory(keys, keys, jnp.ones((1, 1, 3), bool), keys[:, 0])
    >>> carry = Carry(((jnp.ones((1, 2)),),), jnp.ones((1, 4)))
    >>> wiring = Wiring(readout="linear")
    >>> gates = jnp.ones((1, 6))
    >>> carry, query = step(wiring, weights, memory, carry, gates)
    >>> carry.attentional.shape, query.shape
    ((1, 4), (1, 2))
  """
  fed = []
  if wiring.order == "bahdanau":
    query = query_of(wiring, carry.states)
    context = look_back(weights.score, memory, query[:, None])[:, 0]
    fed.append(context)
  if wiring.input_feeding:
    fed.append(carry.attentional)
  if fed:
    joined = jnp.concatenate(fed, -1)
    gates = gates + joined @ weights.fed
  states = advance(wiring, weights, carry.states, gates)
  if wiring.order == "luong":
    query = query_of(wiring, states)
    context = look_back(weights.score, memory, query[:, None])[:, 0]
  attentional = read_out(weights, context, states[-1][0])
  return Carry(states, attentional), query


def project_embeddings(
  weights: DecoderWeights, embeddings: jax.Array
) -> jax.Array:
  """Returns the embeddings' part of the first layer's gates.

  Args:
    weights: the decoder's.
    embeddings: [..., X].

  Returns:
    [..., G].

  Example:
    >>> cell = cells.CellWeights(
    ...   jnp.ones((3, 6)), jnp.ones((2, 6)), jnp.ones(6)
    ... )
    >>> output = Affine(jnp.ones((4, 5)), jnp.ones(5))
    >>> fed = jnp.ones((0, 6))
    >>> weights = DecoderWeights((cell,), fed, None, None, output)
    >>> project_embeddings(weights, jnp.ones((1, 3))).shape
    (1, 6)
  """
  return cells.project(weights.cells[0], embeddings)
