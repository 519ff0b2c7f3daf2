"""Recurrent cells as pure functions, and layers that run them over time.

Axes: B batch, T time, X input feature, N state feature, G gates (3N or 4N).
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from experiments.models.layers.affine import Affine
from experiments.models.rnn import scan

State = tuple[jax.Array, ...]


class CellWeights(NamedTuple):
  """The weights of one layer: input [X, G], recurrent [N, G], bias [G]."""

  input: jax.Array
  recurrent: jax.Array
  bias: jax.Array


def gru(recurrent: jax.Array, gates: jax.Array, state: State) -> State:
  """One step of a gated recurrent unit, reset gate after the product."""
  # See Cho et al., 2014, equations 5 to 8 (https://arxiv.org/abs/1406.1078).
  (hidden,) = state
  size = hidden.shape[-1]
  product = hidden @ recurrent
  reset, update = jnp.split(
    jax.nn.sigmoid(gates[..., : 2 * size] + product[..., : 2 * size]), 2, -1
  )
  candidate = jnp.tanh(
    gates[..., 2 * size :] + reset * product[..., 2 * size :]
  )
  return (candidate + update * (hidden - candidate),)


def lstm(recurrent: jax.Array, gates: jax.Array, state: State) -> State:
  """One step of a long short-term memory, with a forget bias of one."""
  # See Hochreiter and Schmidhuber, 1997, and for the bias Jozefowicz et al.,
  # 2015, section 2.1.
  hidden, cell = state
  gates = gates + hidden @ recurrent
  enter, forget, leave, candidate = jnp.split(gates, 4, -1)
  cell = jax.nn.sigmoid(forget + 1) * cell + jax.nn.sigmoid(enter) * jnp.tanh(
    candidate
  )
  return jax.nn.sigmoid(leave) * jnp.tanh(cell), cell


class Cell(NamedTuple):
  """A kind of cell."""

  step: Callable[[jax.Array, jax.Array, State], State]  # such as `gru`
  num_gates: int  # G / N
  num_parts: int  # number of arrays in a state; the first one is the output


CELLS = {"gru": Cell(gru, 3, 1), "lstm": Cell(lstm, 4, 2)}


def run(
  cell: Cell,
  weights: CellWeights,
  inputs: jax.Array,
  mask: jax.Array,  # [B, T]; False: the state is kept, the output 0
  *,
  reverse: bool = False,  # from the last step to the first
) -> tuple[jax.Array, State]:
  """Runs a layer over [B, T, X]; returns outputs [B, T, N] and final state."""
  chex.assert_rank(inputs, 3, custom_message="inputs")
  chex.assert_shape(mask, inputs.shape[:2], custom_message="mask")
  gates = project(weights, inputs)

  def step(recurrent, _, state: State, now):
    gates, visible = now
    following = cell.step(recurrent, gates, state)
    state = tuple(
      jnp.where(visible, new, old) for new, old in zip(following, state)
    )
    return state, jnp.where(visible, state[0], 0)

  shape = (inputs.shape[0], weights.recurrent.shape[0])
  start = (jnp.zeros(shape, inputs.dtype),) * cell.num_parts
  times = (jnp.swapaxes(gates, 0, 1), jnp.swapaxes(mask, 0, 1)[..., None])
  final, outputs = scan.scan(
    step, weights.recurrent, None, start, times, reverse=reverse
  )
  return jnp.swapaxes(outputs, 0, 1), final


def project(weights: CellWeights, inputs: jax.Array) -> jax.Array:
  """Returns the gates [..., G] of inputs [..., X], inputs @ W + b."""
  return Affine(weights.input, weights.bias)(inputs)


class Recurrent(nn.Module):
  """Owns the weights of one recurrent layer; `cell` is a key of `CELLS`."""

  cell: str
  input_size: int
  hidden_size: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self) -> CellWeights:
    """Returns the weights in the dtype of the computation."""
    gates = CELLS[self.cell].num_gates
    weights = CellWeights(
      self.param(
        "input",
        nn.initializers.lecun_normal(),
        (self.input_size, gates * self.hidden_size),
      ),
      self.param(
        "recurrent",
        _orthogonal_gates(gates),
        (self.hidden_size, gates * self.hidden_size),
      ),
      self.param("bias", nn.initializers.zeros, (gates * self.hidden_size,)),
    )
    return jax.tree.map(lambda weight: weight.astype(self.dtype), weights)


def _orthogonal_gates(gates: int):
  """Initialises an orthogonal matrix for each gate, side by side."""

  def init(rng, shape, dtype=jnp.float32):
    square = (shape[0], shape[1] // gates)
    orthogonal = nn.initializers.orthogonal()
    # Not vmap: jaxlib computes the decompositions of a batch in threads of the
    # pool that waits for them, and two batches at once wait forever.
    blocks = jax.lax.map(
      lambda each: orthogonal(each, square, dtype), jax.random.split(rng, gates)
    )
    return jnp.moveaxis(blocks, 0, 1).reshape(shape)

  return init
