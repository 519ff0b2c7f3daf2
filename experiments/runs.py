"""What a config describes, built: what training and inference share."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh

from experiments import sharding
from experiments.data.batch import Batch
from experiments.data.tasks import Task
from experiments.models import make_model
from experiments.optimizer import make_optimizer
from experiments.schema import Config
from experiments.steps import TrainState, init_state


class Run(NamedTuple):
  """The parts of a run.

  Attributes:
    config: the typed config.
    mesh: the devices.
    task: what is learnt, at the lengths of training.
    model: what learns.
    optimizer: how.
  """

  config: Config
  mesh: Mesh
  task: Task
  model: nn.Module
  optimizer: optax.GradientTransformation


def build(config: Config, *, devices: int | None = None) -> Run:
  """Builds the parts of a run.

  Args:
    config: the typed config.
    devices: overrides `config.mesh.data`.

  Returns:
    The parts.

  Raises:
    UserError: if the devices are not there.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> run = build(parse(base.get_config().to_dict()), devices=1)
    >>> run.task.name, run.model.hidden_size
    ('reverse', 128)
  """
  mesh = sharding.make_mesh(config.mesh.data if devices is None else devices)
  task = Task(
    config.data.name,
    config.data.symbols,
    config.data.min_length,
    config.data.max_length,
  )
  model = make_model(
    config.model,
    vocabulary_size=task.vocabulary_size,
    max_length=max(_evaluation_task(config, task).batch_lengths),
    dtype=config.train.dtype,
  )
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  return Run(config, mesh, task, model, optimizer)


def start(run: Run) -> TrainState:
  """Returns the state before the first step, in the layout of the mesh.

  Args:
    run: from `build`.

  Returns:
    The state, the same in every process.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> run = build(parse(base.get_config().to_dict()), devices=1)
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
    >>> run = build(schema.parse(base.get_config().to_dict()), devices=1)
    >>> abstract_state(run).step.shape
    ()
  """
  layout = sharding.replicated(run.mesh)
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
    jax.eval_shape(functools.partial(_init_state, run)),
  )


def _init_state(run: Run) -> TrainState:
  batch = run.task.training_batch(seed=0, step=0, size=2)
  return init_state(run.model, run.optimizer, batch, run.config.seed)


def evaluation_set(run: Run, split: str) -> Batch:
  """Returns an evaluation set; all sets of a run have the same width.

  Args:
    run: from `build`.
    split: one of `config.data.splits`.

  Returns:
    Sources [N, S] and targets [N, T].

  Raises:
    KeyError: if there is no such set.
    UserError: if the task has too few different sequences.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> run = build(parse(base.get_config().to_dict()), devices=1)
    >>> evaluation_set(run, "validation").source.shape
    (256, 31)
  """
  chosen = run.config.data.splits[split]
  task = dataclasses.replace(
    _evaluation_task(run.config, run.task),
    min_length=chosen.min_length,
    max_length=chosen.max_length,
  )
  return task.evaluation_set(
    run.config.data.evaluation_seed, chosen.num_examples, name=split
  )


def _evaluation_task(config: Config, task: Task) -> Task:
  lengths = [split.max_length for split in config.data.splits.values()]
  return dataclasses.replace(task, width=max(task.max_length, *lengths))
