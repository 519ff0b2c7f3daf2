"""Everything that a config describes, built: data, model, optimizer, mesh."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh

from experiments.config import Config, MeshConfig, TaskConfig, TransformerConfig
from experiments.data.batch import Batch
from experiments.data.dataset import Dataset, TrainingBatches
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.data.text import dataset, prepare
from experiments.distributed import mesh as mesh_lib
from experiments.distributed import sharding
from experiments.distributed.multihost import first_process_first
from experiments.distributed.sharding import ALONE
from experiments.models import make_model
from experiments.optimization.optimizer import make_optimizer
from experiments.optimization.step import (
  TrainState,
  init_state,
  make_train_step,
)
from experiments.run_directory import run_path


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The objects that a config describes; made by `make_experiment`."""

  config: Config
  mesh: Mesh
  data: Dataset
  model: nn.Module
  optimizer: optax.GradientTransformation

  def training_batches(self) -> TrainingBatches:
    """Returns this process's shard of the training batches, by step."""
    config, shard = self.config, mesh_lib.batch_shard(self.mesh)
    return self.data.training_batches(
      config.train, seed=config.seed, shard=shard
    )

  def initial_state(self) -> TrainState:
    """Returns the state before the first step, sharded over the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
    return jax.jit(self._init_state, out_shardings=shardings)()

  @functools.cached_property
  def abstract_state(self) -> TrainState:
    """A state of `jax.ShapeDtypeStruct`, with shardings."""
    return sharding.sharded(jax.eval_shape(self._init_state), self.mesh)

  def train_step(
    self, like: TrainState
  ) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """Returns the compiled update of states sharded like `like`, in place."""
    step = self.jitted_step(like)

    def update(state, batch):
      with jax.set_mesh(self.mesh):
        return step(state, batch)

    return update

  def jitted_step(self, like: TrainState) -> Any:
    """Returns the `jax.jit` function of `train_step`, to run under the mesh."""
    # XLA does not divide kernels over devices.
    model = self.config.model
    is_transformer = isinstance(model, TransformerConfig)
    axes = sharding.mesh_axes(
      self.mesh,
      with_rows=is_transformer and model.attention_implementation == "pallas",
    )
    step = make_train_step(
      # Without `sequence` and `tensor` axes, a model may have no `mesh_axes`.
      self.model if axes == ALONE else self.model.clone(mesh_axes=axes),
      self.optimizer,
      self.config.train,
      mesh_axes=axes,
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    replicated = mesh_lib.replicated(self.mesh)
    return jax.jit(
      step, donate_argnums=0, out_shardings=(shardings, replicated)
    )

  def _init_state(self) -> TrainState:
    return init_state(
      self.model,
      self.optimizer,
      self.config.seed,
      averaged=self.config.train.ema_decay > 0,
    )


def make_experiment(
  config: Config,
  workdir: Path,
  *,
  mesh: MeshConfig | None = None,
  train: bool = False,
) -> Experiment:
  """Builds the data, model, optimizer and device mesh of a config.

  Args:
    config: from `experiments.config.parse`.
    workdir: the run directory, which holds the tokenizers of text.
    mesh: replaces `config.mesh`.
    train: whether to read the training text and train missing tokenizers.

  Raises:
    UserError: if devices or text are missing, or do not fit the config.

  Example:
    >>> from configs import base
    >>> from experiments.config import parse
    >>> config = parse(base.get_config().to_dict())
    >>> experiment = make_experiment(
    ...   config, Path("unused"), mesh=MeshConfig.one()
    ... )
    >>> experiment.training_batches()[0].source.shape
    (32, 26)
  """
  devices = mesh_lib.make_mesh(mesh or config.mesh)
  if train:
    mesh_lib.check_batch(devices, config.train)
  data: Dataset
  if isinstance(config.data, TaskConfig):
    data = SyntheticDataset(config.data)
  else:
    text = config.data
    make: Callable[..., Dataset] = dataset.TranslationDataset
    if train:
      run, _ = config.train.init_run or (None, None)
      source = run_path(run) if run else None
      make = functools.partial(prepare.prepare, init_from=source)
    data = first_process_first(lambda: make(text, workdir))
  return assemble(config, data, devices)


def assemble(config: Config, data: Dataset, mesh: Mesh) -> Experiment:
  """Builds the model and optimizer of a config, for its data and mesh."""
  model = make_model(
    config.model,
    source_vocabulary_size=data.source_vocabulary_size,
    target_vocabulary_size=data.target_vocabulary_size,
    shared_vocabulary=data.shared_vocabulary,
    max_length=data.max_length,
    dtype=config.train.dtype,
  )
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  return Experiment(config, mesh, data, model, optimizer)
