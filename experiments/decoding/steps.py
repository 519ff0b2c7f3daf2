"""Steps of a model for all hypotheses of a search at once.

Axes: B batch, K hypotheses of a source, V vocabulary. A model has steps for one
hypothesis of each source. It may also have `beam_start(source, max_length, K)`
and `beam_step(memory, carry, token, parent) -> carry, logits [K, B, V]`, which
then replace these where its `has_beam_steps` is true.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.decoding.rounded_params import rounded


@dataclasses.dataclass(frozen=True)
class Steps:
  """The steps of a model with its parameters."""

  model: nn.Module
  variables: Any
  beam_size: int
  # The axis of the batch in a carry; in a memory it is the first.
  carry_axis: ClassVar[int]

  def start(self, source: jax.Array, capacity: int) -> tuple[Any, Any]:
    """Returns memory, and a carry whose caches hold so many tokens."""
    raise NotImplementedError

  def prepared(self, memory: Any, carry: Any, batch_size: int) -> "Steps":
    """The same steps; a loop of them does not round parameters again."""
    if jnp.dtype(getattr(self.model, "dtype", jnp.float32)).itemsize >= 4:
      return self

    def step(variables, memory, carry, token):
      steps = dataclasses.replace(self, variables=variables)
      return steps.step(memory, carry, token, None)

    shape = (batch_size, self.beam_size)
    token = jax.ShapeDtypeStruct(shape, jnp.int32)
    variables = rounded(step, self.variables, memory, carry, token)
    return dataclasses.replace(self, variables=variables)

  def step(
    self, memory: Any, carry: Any, token: jax.Array, parent: jax.Array | None
  ) -> tuple[Any, jax.Array]:
    """Returns carry and logits [K, B, V] in float32.

    The hypotheses end with tokens [B, K] and continue those of `parent` [B, K]
    of the step before; None means that each continues its own.
    """
    raise NotImplementedError


class _BeamSteps(Steps):
  """The model's own steps of whole beams."""

  carry_axis = 0

  def start(self, source, capacity):
    return self.model.apply(
      self.variables, source, capacity, self.beam_size, method="beam_start"
    )

  def step(self, memory, carry, token, parent):
    step: Any = self.model.apply(
      self.variables, memory, carry, token, parent, method="beam_step"
    )
    carry, logits = step
    return carry, logits.astype(jnp.float32)


class _MappedSteps(Steps):
  """Steps mapped over the hypotheses; a carry is [K, B, ...], the fastest."""

  carry_axis = 1

  def start(self, source, capacity):
    memory, carry = self.model.apply(
      self.variables, source, capacity, method="start"
    )

    def repeated(leaf):
      shape = (self.beam_size, *leaf.shape)
      return jnp.broadcast_to(leaf, shape) if leaf.ndim else leaf

    return memory, jax.tree.map(repeated, carry)

  def step(self, memory, carry, token, parent):
    if parent is not None:
      carry = _of_parents(carry, parent)
    # A scalar, such as the number of tokens in a cache, is shared: with one for
    # each beam, writes to a cache would become a slow scatter.
    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, carry)

    def step(carry, token):
      step: Any = self.model.apply(
        self.variables, memory, carry, token, method="step"
      )
      carry, logits, _ = step
      return carry, logits.astype(jnp.float32)

    mapped = jax.vmap(step, in_axes=(axes, 0), out_axes=(axes, 0))
    return mapped(carry, token.T)


def make_steps(model: nn.Module, params: Any, beam_size: int) -> Steps:
  """Returns the steps of K hypotheses of each source."""
  has_own = getattr(model, "has_beam_steps", False)
  make = _BeamSteps if has_own else _MappedSteps
  return make(model, {"params": params}, beam_size)


def _of_parents(carry, parent: jax.Array):
  """Returns the carry [K, B, ...] of the beams' parents [B, K]."""
  index = (parent.T, jnp.arange(parent.shape[0])[None])

  def take(leaf):
    # Without the promise every index is checked; vmap over B would transpose
    # the beams behind the batch and back.
    return leaf.at[index].get(mode="promise_in_bounds") if leaf.ndim else leaf

  return jax.tree.map(take, carry)
