"""A training step of a Transformer, sharded in several ways over a slice."""

import functools
from collections.abc import Iterator

from benchmarks.accelerators import step_cases
from benchmarks.accelerators.cases import Case
from experiments.aot import abstract
from experiments.aot.targets import Target
from experiments.config import MeshConfig
from experiments.data.batch import BatchShape

# Devices along each axis of the mesh, by the topology of a TPU.
LAYOUTS = {
  "4x4": {
    "data": {"data": 16},
    "fsdp": {"data": 1, "fsdp": 16},
    "tensor": {"data": 4, "tensor": 4},
    "sequence": {"data": 4, "sequence": 4},
    "mixed": {"data": 2, "fsdp": 2, "sequence": 2, "tensor": 2},
  },
  "16x16": {
    "data": {"data": 256},
    "fsdp": {"data": 1, "fsdp": 256},
    "tensor": {"data": 64, "tensor": 4},
    "sequence": {"data": 64, "sequence": 4},
    "mixed": {"data": 16, "fsdp": 4, "sequence": 2, "tensor": 2},
  },
}
_ROWS_PER_DEVICE, _LENGTH = 8, 128


def cases() -> Iterator[Case]:
  """One case for each topology and layout."""
  for topology, layouts in LAYOUTS.items():
    for name, axes in layouts.items():
      yield Case(
        f"layout/{topology}/{name}",
        functools.partial(_make, topology, axes),
        default=topology == "4x4",
        for_tpus=True,
      )


def _make(topology: str, axes: dict[str, int], target: Target):
  mesh = MeshConfig(**axes)
  devices = target.devices(f"{target.name}:{topology}")
  config = step_cases.load("translation")
  experiment = abstract.abstract_experiment(config, devices, mesh)
  rows = _ROWS_PER_DEVICE * len(devices)
  return abstract.train_step(experiment, BatchShape(rows, _LENGTH, _LENGTH))
