"""The steps of a config as functions of array shapes, without its data."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.config import Config, MeshConfig, TaskConfig, TranslationConfig
from experiments.data.batch import Batch
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.data.synthetic.tasks import batch_lengths
from experiments.data.text.bucketing import batch_sizes
from experiments.data.text.dataset import max_prediction_length
from experiments.decoding.batching import Search, num_rows
from experiments.distributed import mesh as mesh_lib
from experiments.experiment import Experiment, assemble
from experiments.optimization.step import make_loss_step


class Shape(NamedTuple):
  """The shape of a batch."""

  rows: int
  source: int  # tokens of a source
  target: int


@dataclasses.dataclass(frozen=True)
class AbstractText:
  """The sizes of a text dataset; vocabularies are as large as allowed."""

  config: TranslationConfig

  @property
  def source_vocabulary_size(self) -> int:
    """Special tokens included."""
    return self.config.source_tokenizer.vocabulary_size

  @property
  def target_vocabulary_size(self) -> int:
    """Special tokens included."""
    return self.config.target_tokenizer.vocabulary_size

  @property
  def shared_vocabulary(self) -> bool:
    """Whether source and target have the same token ids."""
    return self.config.joint_vocabulary

  @property
  def max_length(self) -> int:
    """Of a source or target, EOS included."""
    return self.config.max_length

  def max_prediction_length(self, source_length: int) -> int:
    """The maximum length if targets are as long as their sources."""
    return max_prediction_length(source_length, 1.0, self.max_length)


def abstract_experiment(
  config: Config, devices: list[Any], mesh: MeshConfig | None = None
) -> Experiment:
  """An experiment of a config on devices that need not exist."""
  data: Any
  if isinstance(config.data, TaskConfig):
    data = SyntheticDataset(config.data)
  else:
    data = AbstractText(config.data)
  return assemble(
    config, data, mesh_lib.make_mesh(mesh or config.mesh, devices)
  )


def batch_shape(config: Config, length: int | None = None) -> Shape:
  """The shape of a training batch; of text, for sources of a length."""
  if isinstance(config.data, TaskConfig):
    sides = batch_lengths(config.data.name, config.data.max_length)
    return Shape(config.train.batch_size, *sides)
  length = length or config.data.max_length
  shapes = np.array([[length, length]])
  return Shape(int(batch_sizes(shapes, config.train)[0]), length, length)


def train_step(
  experiment: Experiment, shape: Shape
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """The compilable training step and its abstract arguments."""
  state = experiment.abstract_state
  rows = PartitionSpec(mesh_lib.ROWS)
  batch = Batch(*_tokens(experiment.mesh, rows, shape))
  return experiment.jitted_step(state), (state, batch)


def evaluation_step(
  experiment: Experiment, shape: Shape
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """The losses of references, and its abstract arguments."""
  rows = PartitionSpec(mesh_lib.AXES)
  batch = Batch(*_tokens(experiment.mesh, rows, shape))
  step = jax.jit(make_loss_step(experiment.model))
  return step, (_replicated_parameters(experiment), batch)


def decoding_step(
  experiment: Experiment, search: Search, source_length: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """A whole search, and its abstract arguments."""
  rows = num_rows(experiment.mesh, search.beam_size)
  length = experiment.data.max_prediction_length(source_length)

  def decode(params, source):
    def search_rows(params, source):
      return search(experiment.model, params, source, None, (), length)

    if search.beam_size > 1:
      return mesh_lib.map_shards(search_rows, experiment.mesh)(params, source)
    return search_rows(params, source)

  shape = Shape(rows, source_length, 1)
  spec = PartitionSpec(mesh_lib.AXES)
  source, _ = _tokens(experiment.mesh, spec, shape)
  return jax.jit(decode), (_replicated_parameters(experiment), source)


def _tokens(mesh: Mesh, spec: PartitionSpec, shape: Shape):
  """Abstract sources and targets."""
  sharding = NamedSharding(mesh, spec)
  return [
    jax.ShapeDtypeStruct((shape.rows, length), jnp.int32, sharding=sharding)
    for length in (shape.source, shape.target)
  ]


def _replicated_parameters(experiment: Experiment) -> Any:
  replicated = mesh_lib.replicated(experiment.mesh)
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=replicated
    ),
    experiment.abstract_state.evaluated,
  )
