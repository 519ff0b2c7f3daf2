"""The training, evaluation and decoding steps of the configs."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.accelerators.cases import Case
from experiments.aot import abstract
from experiments.aot.targets import Target
from experiments.config import Config, MeshConfig, parse
from experiments.data.batch import BatchShape
from experiments.decoding.batching import Search, num_rows
from experiments.distributed import mesh as mesh_lib
from experiments.experiment import Experiment
from experiments.optimization.step import make_loss_step

# A config file and its argument.
CONFIGS = (
  "copy",
  "lookup",
  "reverse",
  "reverse:dot",
  "reverse:transformer",
  "numbers",
  "multi30k_small",
  "multi30k",
  "multi30k:additive",
  "translation",
  "translation:additive",
)
_DEFAULT_CONFIGS = ("reverse", "multi30k", "multi30k:additive")
# The batch shapes of a run of configs/multi30k.py.
MULTI30K_SHAPES = (
  (408, 10, 10),
  (368, 11, 11),
  (336, 12, 12),
  (288, 14, 13),
  (272, 15, 15),
  (240, 16, 17),
  (224, 18, 18),
  (200, 19, 20),
  (192, 21, 21),
  (168, 23, 24),
  (152, 25, 26),
  (136, 27, 29),
  (120, 33, 34),
  (80, 49, 51),
)
# With data.num_shapes=4, data.length_multiple=8 and model.scan_layers.
MULTI30K_ALIGNED_SHAPES = (
  (256, 16, 16),
  (168, 24, 24),
  (128, 32, 32),
  (72, 56, 56),
)
# How the layers of a Transformer are compiled, besides unrolled.
LAYERS: dict[str, dict[str, Any]] = {
  "scan": {"scan_layers": True},
  "remat": {"remat": True},
  "scan-remat": {"scan_layers": True, "remat": True},
}
_SOURCE_LENGTH = 32  # of text that is decoded
_BEAM_SIZE = 5
_KINDS = ("train", "evaluate", "greedy", "beam")


def cases() -> Iterator[Case]:
  """One case for each config and step, and each shape of Multi30k."""
  for name in CONFIGS:
    for kind in _KINDS:
      yield Case(
        f"step/{name}/{kind}",
        functools.partial(_make, name, kind, None, {}),
        name in _DEFAULT_CONFIGS,
      )
  for layers, fields in LAYERS.items():
    yield Case(
      f"step/multi30k/train-{layers}",
      functools.partial(_make, "multi30k", "train", None, fields),
      True,
    )
  for layers, shapes in (
    ("unrolled", MULTI30K_SHAPES),
    ("scan", MULTI30K_ALIGNED_SHAPES),
  ):
    fields = LAYERS.get(layers, {})
    for shape in shapes:
      sizes = "x".join(map(str, shape))
      yield Case(
        f"shapes/multi30k/{layers}/{sizes}",
        functools.partial(
          _make, "multi30k", "train", BatchShape(*shape), fields
        ),
      )


def load(name: str, **model: Any) -> Config:
  """The config of a file of `configs/` and its argument, in bfloat16.

  `model` has fields of its model that differ.
  """
  file, _, argument = name.partition(":")
  config = importlib.import_module(f"configs.{file}").get_config(argument)
  config.train.dtype = "bfloat16"
  config.model.update(model)
  return parse(config.to_dict())


def _make(
  name: str,
  kind: str,
  shape: BatchShape | None,
  model: dict[str, Any],
  target: Target,
):
  config = load(name, **model)
  experiment = abstract.abstract_experiment(
    config, target.devices(), MeshConfig.one()
  )
  if kind in ("greedy", "beam"):
    search = Search(beam_size=_BEAM_SIZE if kind == "beam" else 1)
    length = min(_SOURCE_LENGTH, experiment.data.max_length)
    return _decoding_step(experiment, search, length)
  shape = shape or abstract.batch_shape(config, _SOURCE_LENGTH)
  make = abstract.train_step if kind == "train" else _evaluation_step
  return make(experiment, shape)


def _evaluation_step(
  experiment: Experiment, shape: BatchShape
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """The losses of references, and its abstract arguments."""
  batch = mesh_lib.abstract_batch(shape, experiment.mesh, mesh_lib.AXES)
  step = jax.jit(make_loss_step(experiment.model))
  return step, (_replicated_parameters(experiment), batch)


def _decoding_step(
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

  shape = BatchShape(rows, source_length, 1)
  batch = mesh_lib.abstract_batch(shape, experiment.mesh, mesh_lib.AXES)
  return jax.jit(decode), (_replicated_parameters(experiment), batch.source)


def _replicated_parameters(experiment: Experiment) -> Any:
  replicated = mesh_lib.replicated(experiment.mesh)
  return jax.tree.map(
    lambda leaf: leaf.update(sharding=replicated),
    experiment.abstract_state.evaluated,
  )
