"""What a config describes, built: what training and inference share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

from experiments.config import (
  Config,
  MeshConfig,
  ModelConfig,
  Seq2SeqConfig,
  TaskConfig,
)
from experiments.data.batch import BOS, Batch
from experiments.data.dataset import Dataset, TrainingBatches
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.data.text import dataset, prepare
from experiments.distributed import mesh as mesh_lib
from experiments.distributed import sharding
from experiments.distributed.multihost import first_process_first
from experiments.errors import UserError
from experiments.models import make_model
from experiments.optimization.optimizer import make_optimizer
from experiments.optimization.step import (
  TrainState,
  init_state,
  make_train_step,
)


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
  mesh: MeshConfig | None = None,
  train: bool = False,
) -> Run:
  """Builds the parts of a run.

  Args:
    config: the typed config.
    workdir: the run's directory, which holds what belongs to text.
    mesh: instead of `config.mesh`.
    train: whether the training text is read too, and what belongs to it made
      if it is not there yet.

  Returns:
    The parts.

  Raises:
    UserError: if the devices or the text are not there.

  Example:
    >>> from configs import base
    >>> from experiments.config import parse
    >>> config = parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), mesh=MeshConfig.one())
    >>> run.data.task.name, run.model.hidden_size
    ('reverse', 128)
  """
  mesh = mesh or config.mesh
  _check_mesh(mesh, config.model)
  devices = mesh_lib.make_mesh(mesh)
  data: Dataset
  if isinstance(config.data, TaskConfig):
    data = SyntheticDataset(config.data)
  else:
    make = prepare.prepare if train else dataset.load
    data = first_process_first(functools.partial(make, config.data, workdir))
  model = make_model(
    config.model,
    source_vocabulary_size=data.source_vocabulary_size,
    target_vocabulary_size=data.target_vocabulary_size,
    shared_vocabulary=data.shared_vocabulary,
    max_length=data.max_length,
    dtype=config.train.dtype,
  )
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  return Run(config, devices, data, model, optimizer)


def training_batches(run: Run) -> TrainingBatches:
  """Returns the batches of training, this process's share of them.

  Args:
    run: from `build`, for training.

  Returns:
    Batches by step.

  Raises:
    UserError: if they do not divide over the devices.

  Example:
    >>> from configs import base
    >>> from experiments.config import parse
    >>> config = parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), mesh=MeshConfig.one())
    >>> training_batches(run)[0].source.shape
    (32, 26)
  """
  config = run.config.train
  if config.batch_unit == "examples":
    mesh_lib.check_batch(run.mesh, config.batch_size, config.accumulation)
    multiple = 1
  else:
    multiple = config.row_multiple
    mesh_lib.check_rows(run.mesh, multiple, config.accumulation)
  return run.data.training_batches(
    seed=run.config.seed,
    size=config.batch_size,
    unit=config.batch_unit,
    multiple=multiple,
    shard=mesh_lib.batch_shard(run.mesh),
  )


def start(run: Run) -> TrainState:
  """Returns the state before the first step, in the layout of the mesh.

  Args:
    run: from `build`.

  Returns:
    The state, the same in every process.

  Example:
    >>> from configs import base
    >>> from experiments.config import parse
    >>> config = parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), mesh=MeshConfig.one())
    >>> state = jax.eval_shape(lambda: start(run))
    >>> state.params["encoder"]["embedding"]["embedding"].shape
    (53, 64)
  """
  make = functools.partial(_init_state, run)
  layouts = sharding.layouts(jax.eval_shape(make), run.mesh)
  return jax.jit(make, out_shardings=layouts)()


def make_step(
  run: Run, like: TrainState
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
  """Makes the compiled function of one update, on the run's devices.

  Args:
    run: from `build`, for training.
    like: a state, or what `abstract_state` says of it.

  Returns:
    (state, batch) -> (state, metrics), as `steps.make_train_step`; it takes
    batches from `mesh.place_rows`, and a state whose memory it uses again.

  Example:
    >>> make_step(run, state)  # doctest: +SKIP
  """
  step = jitted_step(run, like)

  def update(state: TrainState, batch: Batch):
    with jax.set_mesh(run.mesh):
      return step(state, batch)

  return update


def jitted_step(run: Run, like: TrainState) -> Any:
  """Makes what `make_step` calls, to be lowered or called under the mesh.

  Args:
    run: from `build`, for training.
    like: a state, or what `abstract_state` says of it.

  Returns:
    A `jax.jit` function.

  Example:
    >>> with jax.set_mesh(run.mesh):  # doctest: +SKIP
    ...   jitted_step(run, state).lower(state, batch).compile().as_text()
  """
  config, axes = run.config.train, sharding.mesh_axes(run.mesh)
  model = run.model
  if axes != sharding.ALONE:
    model = model.clone(mesh_axes=axes)
  step = make_train_step(
    model,
    run.optimizer,
    mesh_axes=axes,
    label_smoothing=config.label_smoothing,
    accumulation=config.accumulation,
    ema_decay=config.ema_decay,
    skip_non_finite=config.non_finite == "skip",
  )
  layouts = jax.tree.map(lambda leaf: leaf.sharding, like)
  return jax.jit(
    step,
    donate_argnums=0,
    out_shardings=(layouts, mesh_lib.replicated(run.mesh)),
  )


def abstract_state(run: Run) -> TrainState:
  """Returns the shapes and layout of a state, to restore a checkpoint to.

  Args:
    run: the parts of a run.

  Returns:
    A `TrainState` of `jax.ShapeDtypeStruct`.

  Example:
    >>> from configs import base
    >>> from experiments.config import parse
    >>> config = parse(base.get_config().to_dict())
    >>> run = build(config, Path("unused"), mesh=MeshConfig.one())
    >>> abstract_state(run).step.shape
    ()
  """
  state = jax.eval_shape(functools.partial(_init_state, run))
  return jax.tree.map(
    lambda leaf, layout: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=layout
    ),
    state,
    sharding.layouts(state, run.mesh),
  )


def _check_mesh(mesh: MeshConfig, model: ModelConfig) -> None:
  """Refuses meshes that a model cannot use."""
  if isinstance(model, Seq2SeqConfig):
    for axis in ("sequence", "tensor"):
      if getattr(mesh, axis) > 1:
        raise UserError(
          f"config.mesh.{axis}: {getattr(mesh, axis)}, but a recurrent model"
          " goes from token to token on one device; use 1, and share its rows"
          " over config.mesh.data or fsdp"
        )
  elif model.num_heads % mesh.tensor:
    raise UserError(
      f"config.mesh.tensor: {model.num_heads} heads (config.model.num_heads) do"
      f" not divide over {mesh.tensor} devices"
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
