"""What a config describes, built: what training and inference share."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

from experiments import sharding
from experiments.data import translation
from experiments.data.batch import BOS, Batch
from experiments.data.dataset import Batches, Dataset, Sharing
from experiments.data.synthetic import Synthetic
from experiments.models import make_model
from experiments.optimizer import make_optimizer
from experiments.schema import Config, TaskConfig
from experiments.steps import TrainState, init_state


class Run(NamedTuple):
  """The parts of a run.

  Attributes:
    config: the typed config.
    mesh: the devices.
    data: what is learnt from.
    model: what learns.
    optimizer: how.
  """

  config: Config
  mesh: Mesh
  data: Dataset
  model: nn.Module
  optimizer: optax.GradientTransformation


def build(
  config: Config,
  workdir: Path,
  *,
  devices: int | None = None,
  train: bool = False,
) -> Run:
  """Builds the parts of a run.

  Args:
    config: the typed config.
    workdir: the run's directory, which holds what belongs to text.
    devices: overrides `config.mesh.data`.
    train: whether the training text is read too, and what belongs to it made
      if it is not there yet.

  Returns:
    The parts.

  Raises:
    UserError: if the devices or the text are not there.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), devices=1)
    >>> run.data.task.name, run.model.hidden_size
    ('reverse', 128)
  """
  mesh = sharding.make_mesh(config.mesh.data if devices is None else devices)
  data: Dataset
  if isinstance(config.data, TaskConfig):
    data = Synthetic(config.data)
  else:
    make = translation.prepare if train else translation.load
    data = sharding.first_process_first(
      functools.partial(make, config.data, workdir)
    )
  model = make_model(
    config.model,
    source_vocabulary_size=data.source_vocabulary_size,
    target_vocabulary_size=data.target_vocabulary_size,
    shared_vocabulary=data.shared_vocabulary,
    max_length=data.max_length,
    dtype=config.train.dtype,
  )
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  return Run(config, mesh, data, model, optimizer)


def training_batches(run: Run) -> Batches:
  """Returns the batches of training, this process's share of them.

  Args:
    run: from `build`, for training.

  Returns:
    Batches by step.

  Raises:
    UserError: if they do not divide over the devices.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), devices=1)
    >>> training_batches(run)[0].source.shape
    (32, 26)
  """
  config = run.config.train
  if config.batch_unit == "examples":
    sharding.check_batch(run.mesh, config.batch_size, config.accumulation)
  return run.data.training_batches(
    seed=run.config.seed,
    size=config.batch_size,
    unit=config.batch_unit,
    sharing=Sharing(
      multiple=run.mesh.devices.size * config.accumulation,
      process=jax.process_index(),
      num_processes=jax.process_count(),
    ),
  )


def start(run: Run) -> TrainState:
  """Returns the state before the first step, in the layout of the mesh.

  Args:
    run: from `build`.

  Returns:
    The state, the same in every process.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> config = parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), devices=1)
    >>> state = jax.eval_shape(lambda: start(run))
    >>> state.params["encoder"]["embedding"]["embedding"].shape
    (53, 64)
  """
  make = functools.partial(_init_state, run)
  return jax.jit(make, out_shardings=sharding.replicated(run.mesh))()


def abstract_state(run: Run) -> TrainState:
  """Returns the shapes and layout of a state, to restore a checkpoint to.

  Args:
    run: the parts of a run.

  Returns:
    A `TrainState` of `jax.ShapeDtypeStruct`.

  Example:
    >>> from configs import base
    >>> from experiments import schema
    >>> config = schema.parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), devices=1)
    >>> abstract_state(run).step.shape
    ()
  """
  layout = sharding.replicated(run.mesh)
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
    jax.eval_shape(functools.partial(_init_state, run)),
  )


def _init_state(run: Run) -> TrainState:
  tokens = np.full((1, 2), BOS)
  return init_state(
    run.model,
    run.optimizer,
    Batch(tokens, tokens),
    run.config.seed,
    averaged=run.config.train.ema_decay > 0,
  )
