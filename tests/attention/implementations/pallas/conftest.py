"""Counts the kernels for Hopper GPUs that a test calls."""

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture
def launched(monkeypatch):
  """The kernels that have been called."""
  kernel, calls = plgpu.kernel, []

  def count(*arguments, **options):
    calls.append(arguments)
    return kernel(*arguments, **options)

  monkeypatch.setattr(plgpu, "kernel", count)
  return calls
