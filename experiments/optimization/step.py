"""The state of training, and the pure functions that update it.

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
from experiments.config import TrainConfig
from experiments.data.batch import PAD, Batch
from experiments.distributed import mesh as mesh_lib
from experiments.distributed.sharding import ALONE, mesh_axes, ring_order
from experiments.optimization import losses

# Metrics that must be finite. The parameters' norm is needed besides the loss:
# an update may overflow although the loss before it was finite.
FINITE = ("loss", "gradient_norm", "parameter_norm")


@flax.struct.dataclass
class TrainState:
  """Everything that a step changes, and all that a checkpoint stores.

  Attributes:
    step: number of updates made, an int32 scalar.
    params: the parameters, float32.
    opt_state: the optimizer state.
    rng: the run's key; a step uses `fold_in(rng, step)`.
    average: the moving average of the parameters, or None.
  """

  step: jax.Array
  params: Any
  opt_state: optax.OptState
  rng: jax.Array
  average: Any

  @property
  def evaluated(self) -> Any:
    """The parameters to evaluate: the moving average, if there is one."""
    return self.params if self.average is None else self.average


def init_state(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  batch: Batch,
  seed: int,
  *,
  averaged: bool = False,
) -> TrainState:
  """Initializes parameters and optimizer; `batch` provides the shapes."""
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
    mesh_axes: of the model; decides the order of tokens.
    label_smoothing: of the loss.
    accumulation: number of parts of the batch that are processed one after the
      other; the gradient is that of the whole batch.
    ema_decay: of the moving average, if the state has one.
    skip_non_finite: whether a step with non-finite metrics changes only the
      number of steps.

  Returns:
    (state, batch) -> (state, metrics). The metrics are scalars: loss and
    teacher_forced_accuracy over all target tokens, gradient_norm before
    clipping, parameter_norm after the update, and tokens, the number of target
    tokens.
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
    batch = _arranged(batch, mesh_axes)
    (loss, hits), grads = _accumulated(
      value_and_grad, state.params, batch, rng, parts=accumulation
    )
    grads = jax.tree.map(lambda grad: grad / tokens, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      "loss": loss / tokens,
      "teacher_forced_accuracy": hits / tokens,
      "gradient_norm": optax.tree.norm(grads),
      "parameter_norm": optax.tree.norm(params),
      "tokens": tokens,
    }
    updated = dataclasses.replace(
      state,
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      average=_updated_average(state.average, params, state.step, ema_decay),
    )
    if skip_non_finite:
      skipped = dataclasses.replace(state, step=state.step + 1)
      finite = jnp.isfinite(jnp.stack([metrics[name] for name in FINITE])).all()
      updated = jax.tree.map(
        functools.partial(jnp.where, finite), updated, skipped
      )
    return updated, metrics

  return train_step


def make_sharded_train_step(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  config: TrainConfig,
  mesh: jax.sharding.Mesh,
  like: TrainState,
) -> Any:
  """Makes the `jax.jit` function of one update, to be called under the mesh.

  The new state is sharded like `like` and takes the memory of the old one.
  """
  axes = mesh_axes(mesh)
  if axes != ALONE:
    model = model.clone(mesh_axes=axes)
  step = make_train_step(
    model,
    optimizer,
    mesh_axes=axes,
    label_smoothing=config.label_smoothing,
    accumulation=config.accumulation,
    ema_decay=config.ema_decay,
    skip_non_finite=config.non_finite == "skip",
  )
  shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
  return jax.jit(
    step,
    donate_argnums=0,
    out_shardings=(shardings, mesh_lib.replicated(mesh)),
  )


def _arranged(batch: Batch, mesh_axes: MeshAxes) -> Batch:
  """Pads and orders the tokens for the devices of a ring."""
  multiple = mesh_axes.ring_size * num_chunks(mesh_axes.order)
  if mesh_axes.ring_size == 1:
    return batch

  def arrange(tokens):
    fill = -tokens.shape[1] % multiple
    tokens = jnp.pad(tokens, ((0, 0), (0, fill)), constant_values=PAD)
    return ring_order(tokens, mesh_axes)

  return jax.tree.map(arrange, batch)


def _updated_average(average, params, step, decay):
  """Updates a moving average; the decay is smaller during the first steps.

  See "Averaging Weights Leads to Wider Optima and Better Generalization",
  Izmailov et al., 2018 (https://arxiv.org/abs/1803.05407).
  """
  if average is None:
    return None
  kept = jnp.minimum(decay, (1 + step) / (10 + step))
  return optax.incremental_update(params, average, 1 - kept)


def _accumulated(value_and_grad, params, batch: Batch, rng, *, parts: int):
  """Sums loss, hits and gradients over the parts of a batch, in sequence."""
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
  """[B, ...] to [A, B / A, ...]; no example changes its device."""

  def split(array):
    shape = (array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.swapaxes(array.reshape(shape), 0, 1)

  return jax.tree.map(split, batch)


def make_loss_step(
  model: nn.Module,
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
  """Makes (params, batch) -> (losses [B], tokens [B]), without smoothing.

  A loss is the sum over the target's tokens.
  """

  def loss_step(params, batch: Batch):
    made: Any = model.apply({"params": params}, *batch, method="features")
    features, readout = made
    target = jnp.asarray(batch.target)
    token_losses, _ = losses.cross_entropy(features, readout, target)
    return token_losses.sum(-1), (batch.target != PAD).sum(-1)

  return loss_step
