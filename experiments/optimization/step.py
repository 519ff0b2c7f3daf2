"""The state of training, and the pure steps that move it.

Axes: B batch, A parts of an accumulated update, S source, T target.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from attention.modules import MeshAxes
from attention.ring.order import num_chunks
from experiments.data.batch import PAD, Batch
from experiments.distributed.sharding import ALONE
from experiments.optimization import losses

# Metrics that must be: an update can spoil what the loss before it does not
# show.
FINITE = ("loss", "gradient_norm", "parameter_norm")


@flax.struct.dataclass
class TrainState:
  """Everything that a step changes, and all that a checkpoint keeps.

  Attributes:
    step: number of updates made, an int32 scalar.
    params: the model's parameters, float32.
    opt_state: the optimiser's state.
    rng: the run's key; a step's randomness is `fold_in(rng, step)`.
    average: the moving average of the parameters, or None.

  Example:
    >>> state = TrainState(
    ...   step=jnp.int32(0), params={"w": jnp.ones(2)}, opt_state=(),
    ...   rng=jax.random.key(0), average=None,
    ... )
    >>> dataclasses.replace(state, step=state.step + 1).step
    Array(1, dtype=int32)
  """

  step: jax.Array
  params: Any
  opt_state: optax.OptState
  rng: jax.Array
  average: Any

  @property
  def evaluated(self) -> Any:
    """The parameters to answer with."""
    return self.params if self.average is None else self.average


def init_state(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  batch: Batch,
  seed: int,
  *,
  averaged: bool = False,
) -> TrainState:
  """Draws the parameters and starts the optimiser.

  Args:
    model: takes (source, target).
    optimizer: from `make_optimizer`.
    batch: an example, for its shapes.
    seed: the run's seed.
    averaged: whether to keep a moving average of the parameters.

  Returns:
    The state before the first step.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> batch = Batch(jnp.array([[3, 4, 2]]), jnp.array([[4, 2]]))
    >>> def init():
    ...   return init_state(model, optax.adam(0.1), batch, seed=0)
    >>> jax.eval_shape(init).params["output"]["kernel"].shape
    (6, 9)
  """
  params_rng, rng = jax.random.split(jax.random.key(seed))
  params = model.init(params_rng, batch.source, batch.target)["params"]
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    rng=rng,
    average=params if averaged else None,
  )


def make_train_step(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  mesh_axes: MeshAxes = ALONE,
  label_smoothing: float = 0.0,
  accumulation: int = 1,
  ema_decay: float = 0.0,
  skip_non_finite: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
  """Makes the pure function of one update.

  Args:
    model: its `features` take (source, target, train=).
    optimizer: from `make_optimizer`.
    mesh_axes: those of the model, which tokens are laid out for.
    label_smoothing: of the loss.
    accumulation: number of parts, one after the other, whose gradients are
      summed; the update is that of the whole batch.
    ema_decay: the share of itself that the average keeps, if there is one.
    skip_non_finite: whether a step whose metrics are not all finite leaves
      everything but the number of steps as it was.

  Returns:
    (state, batch) -> (state, metrics), metrics being scalars: loss and
    token_accuracy over all target tokens, gradient_norm before clipping,
    parameter_norm after the update, and tokens, the number of target tokens.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> batch = Batch(jnp.array([[3, 4, 2]]), jnp.array([[4, 2]]))
    >>> optimizer = optax.adam(0.1)
    >>> state = jax.eval_shape(lambda: init_state(model, optimizer, batch, 0))
    >>> train_step = make_train_step(model, optimizer)
    >>> state, metrics = jax.eval_shape(train_step, state, batch)
    >>> state.step.shape, metrics["loss"].shape
    ((), ())
  """

  def total_loss(params, batch: Batch, rng):
    made: Any = model.apply(
      {"params": params},
      batch.source,
      batch.target,
      train=True,
      rngs={"dropout": rng},
      method="features",
    )
    features, readout = made
    return losses.shared_cross_entropy(
      features, readout, jnp.asarray(batch.target), label_smoothing
    )

  value_and_grad = jax.value_and_grad(total_loss, has_aux=True)

  def train_step(state: TrainState, batch: Batch):
    chex.assert_rank([batch.source, batch.target], 2)
    rng = jax.random.fold_in(state.rng, state.step)
    tokens = (batch.target != PAD).sum()
    batch = _laid_out(batch, mesh_axes)
    (loss, right), grads = _summed(
      value_and_grad, state.params, batch, rng, parts=accumulation
    )
    grads = jax.tree.map(lambda grad: grad / tokens, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      "loss": loss / tokens,
      "token_accuracy": right / tokens,
      "gradient_norm": optax.tree.norm(grads),
      "parameter_norm": optax.tree.norm(params),
      "tokens": tokens,
    }
    moved = dataclasses.replace(
      state,
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      average=_moved(state.average, params, state.step, ema_decay),
    )
    if skip_non_finite:
      stayed = dataclasses.replace(state, step=state.step + 1)
      finite = jnp.isfinite(jnp.stack([metrics[name] for name in FINITE])).all()
      moved = jax.tree.map(functools.partial(jnp.where, finite), moved, stayed)
    return moved, metrics

  return train_step


def _laid_out(batch: Batch, mesh_axes: MeshAxes) -> Batch:
  """Pads tokens so that they divide over the devices, and arranges them."""
  multiple = mesh_axes.ring_size * num_chunks(mesh_axes.order)
  if mesh_axes.ring_size == 1:
    return batch

  def lay_out(tokens):
    fill = -tokens.shape[1] % multiple
    tokens = jnp.pad(tokens, ((0, 0), (0, fill)), constant_values=PAD)
    return mesh_axes.arrange(tokens, axis=1)

  return jax.tree.map(lay_out, batch)


def _moved(average, params, step, decay):
  """Moves an average, sooner at first so that the start is forgotten.

  See "Averaging Weights Leads to Wider Optima and Better Generalization",
  Izmailov et al., 2018 (https://arxiv.org/abs/1803.05407), for averages of a
  training's path.
  """
  if average is None:
    return None
  kept = jnp.minimum(decay, (1 + step) / (10 + step))
  return optax.incremental_update(params, average, 1 - kept)


def _summed(value_and_grad, params, batch: Batch, rng, *, parts: int):
  """Sums loss, hits and gradient over the parts of a batch, one by one."""
  if parts == 1:
    return value_and_grad(params, batch, rng)
  batches = _split(batch, parts)

  def add(total, part):
    index, batch = part
    result = value_and_grad(params, batch, jax.random.fold_in(rng, index))
    return jax.tree.map(jnp.add, total, result), None

  first = jax.tree.map(lambda array: array[0], batches)
  zero = jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
    jax.eval_shape(value_and_grad, params, first, rng),
  )
  total, _ = jax.lax.scan(add, zero, (jnp.arange(parts), batches))
  return total


def _split(batch: Batch, parts: int) -> Batch:
  """[B, ...] to [A, B / A, ...]; every device keeps its own examples."""

  def split(array):
    shape = (array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.swapaxes(array.reshape(shape), 0, 1)

  return jax.tree.map(split, batch)


def make_loss_step(
  model: nn.Module,
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
  """Makes the pure function that scores references, without smoothing.

  Args:
    model: its `features` take (source, target).

  Returns:
    (params, batch) -> (losses [B] summed over tokens, tokens [B]).

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> batch = Batch(jnp.array([[3, 4, 2]]), jnp.array([[4, 2]]))
    >>> def score(rng):
    ...   params = model.init(rng, *batch)["params"]
    ...   return make_loss_step(model)(params, batch)
    >>> losses, tokens = jax.eval_shape(score, jax.random.key(0))
    >>> losses.shape, tokens.shape
    ((1,), (1,))
  """

  def loss_step(params, batch: Batch):
    made: Any = model.apply({"params": params}, *batch, method="features")
    features, readout = made
    target = jnp.asarray(batch.target)
    token_losses, _ = losses.cross_entropy(features, readout, target)
    return token_losses.sum(-1), (batch.target != PAD).sum(-1)

  return loss_step
