"""The training step of a config as a function of shapes, without its data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.config import Config, MeshConfig, TaskConfig
from experiments.data.batch import BatchShape
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.data.synthetic.tasks import batch_lengths
from experiments.data.text.bucketing import batch_sizes
from experiments.data.text.dataset import max_prediction_length
from experiments.distributed import mesh as mesh_lib
from experiments.experiment import Experiment, assemble


@dataclasses.dataclass(frozen=True)
class AbstractText:
  """The sizes of a text dataset; vocabularies are as large as allowed."""

  source_vocabulary_size: int  # special tokens included
  target_vocabulary_size: int  # special tokens included
  shared_vocabulary: bool  # whether source and target have the same token ids
  max_length: int  # of a source or target, EOS included

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
    text = config.data
    data = AbstractText(
      text.source_tokenizer.vocabulary_size,
      text.target_tokenizer.vocabulary_size,
      text.joint_vocabulary,
      text.max_length,
    )
  return assemble(
    config, data, mesh_lib.make_mesh(mesh or config.mesh, devices)
  )


def batch_shape(config: Config, length: int | None = None) -> BatchShape:
  """The shape of a training batch; of text, for sources of a length."""
  if isinstance(config.data, TaskConfig):
    sides = batch_lengths(config.data.name, config.data.max_length)
    return BatchShape(config.train.batch_size, *sides)
  length = length or config.data.max_length
  shapes = np.array([[length, length]])
  return BatchShape(int(batch_sizes(shapes, config.train)[0]), length, length)


def train_step(
  experiment: Experiment, shape: BatchShape
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """The compilable training step and its abstract arguments."""
  state = experiment.abstract_state
  batch = mesh_lib.abstract_batch(shape, experiment.mesh)
  return experiment.jitted_step(state), (state, batch)
