"""The state of training, and the pure functions that update it."""

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
from experiments.config import TrainConfig
from experiments.data.batch import BOS, PAD, Batch
from experiments.distributed.sharding import ALONE, ring_order
from experiments.hash_rng import hash_key
from experiments.optimization import losses

# Metrics that must be finite. The parameters' norm is needed besides the loss:
# an update may overflow although the loss before it was finite.
FINITE = ("loss", "gradient_norm", "parameter_norm")


@flax.struct.dataclass
class TrainState:
  """Everything that a step changes, and all that a checkpoint stores."""

  step: jax.Array  # int32 number of updates made
  params: Any  # float32
  opt_state: optax.OptState
  rng: jax.Array  # of the run; a step uses fold_in(rng, step)
  average: Any  # moving average of the parameters, or None

  @property
  def evaluated(self) -> Any:
    """The parameters to evaluate: the moving average, if there is one."""
    return self.params if self.average is None else self.average


def init_state(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  seed: int,
  *,
  averaged: bool = False,
) -> TrainState:
  """Initializes parameters, their average if `averaged`, and optimizer."""
  params_rng, rng = jax.random.split(jax.random.key(seed))
  tokens = jnp.full((1, 2), BOS)
  params = model.init(params_rng, tokens, tokens)["params"]
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
  config: TrainConfig = TrainConfig(),
  *,
  mesh_axes: MeshAxes = ALONE,  # of the model
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
  """Makes the pure function (state, batch) -> (state, metrics) of an update."""
  total_loss = functools.partial(_total_loss, model, config.label_smoothing)
  value_and_grad = jax.value_and_grad(total_loss, has_aux=True)

  def train_step(state: TrainState, batch: Batch):
    chex.assert_rank([batch.source, batch.target], 2)
    rng = jax.random.fold_in(state.rng, state.step)
    tokens = (batch.target != PAD).sum()
    batch = _arranged(batch, mesh_axes)
    (loss, hits), grads = _accumulated(
      value_and_grad, state.params, batch, rng, parts=config.accumulation
    )
    grads = jax.tree.map(lambda grad: grad / tokens, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      "loss": loss / tokens,
      "teacher_forced_accuracy": hits / tokens,
      # Before clipping; the norm of the parameters is that after the update.
      "gradient_norm": optax.tree.norm(grads),
      "parameter_norm": optax.tree.norm(params),
      "tokens": tokens,
    }
    average = _updated_average(
      state.average, params, state.step, config.ema_decay
    )
    updated = TrainState(state.step + 1, params, opt_state, state.rng, average)
    if config.non_finite == "skip":
      updated = _if_finite(metrics, updated, state)
    return updated, metrics

  return train_step


def _total_loss(model: nn.Module, label_smoothing: float, params, batch, rng):
  """The sums of losses and of correct predictions over a batch."""
  made: Any = model.apply(
    {"params": params},
    batch.source,
    batch.target,
    train=True,
    rngs={"dropout": hash_key(rng)},
    method="features",
  )
  features, readout = made
  return losses.sharded_cross_entropy(
    features, readout, jnp.asarray(batch.target), label_smoothing
  )


def _arranged(batch: Batch, mesh_axes: MeshAxes) -> Batch:
  """Pads and orders the tokens for the devices of a ring."""
  if mesh_axes.ring_size == 1:
    return batch
  multiple = mesh_axes.length_multiple

  def arrange(tokens):
    fill = -tokens.shape[1] % multiple
    tokens = jnp.pad(tokens, ((0, 0), (0, fill)), constant_values=PAD)
    return ring_order(tokens, mesh_axes)

  return jax.tree.map(arrange, batch)


def _updated_average(average, params, step, decay):
  """Updates a moving average; the decay is smaller during the first steps."""
  if average is None:
    return None
  # See Izmailov et al., 2018 (https://arxiv.org/abs/1803.05407).
  kept = jnp.minimum(decay, (1 + step) / (10 + step))
  return optax.incremental_update(params, average, 1 - kept)


def _if_finite(metrics, updated: TrainState, state: TrainState) -> TrainState:
  """Returns `updated` if the metrics are finite, else skips the update."""
  skipped = dataclasses.replace(state, step=state.step + 1)
  finite = jnp.isfinite(jnp.stack([metrics[name] for name in FINITE])).all()
  return jax.tree.map(functools.partial(jnp.where, finite), updated, skipped)


def _accumulated(value_and_grad, params, batch: Batch, rng, *, parts: int):
  """Sums loss, hits and gradients over the parts of a batch, in sequence."""
  if parts == 1:
    return value_and_grad(params, batch, rng)

  def split(array):  # so that no example changes its device
    shape = (array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.swapaxes(array.reshape(shape), 0, 1)

  def add(total, part):
    index, batch = part
    result = value_and_grad(params, batch, jax.random.fold_in(rng, index))
    return jax.tree.map(jnp.add, total, result), None

  batches = jax.tree.map(split, batch)
  first = jax.tree.map(lambda array: array[0], batches)
  zero = jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
    jax.eval_shape(value_and_grad, params, first, rng),
  )
  total, _ = jax.lax.scan(add, zero, (jnp.arange(parts), batches))
  return total


def make_loss_step(
  model: nn.Module,
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
  """Makes (params, batch) -> (summed losses [B], numbers of tokens [B])."""

  def loss_step(params, batch: Batch):
    made: Any = model.apply({"params": params}, *batch, method="features")
    features, readout = made
    target = jnp.asarray(batch.target)
    token_losses, _ = losses.cross_entropy(features, readout, target)
    return token_losses.sum(-1), (batch.target != PAD).sum(-1)

  return loss_step
