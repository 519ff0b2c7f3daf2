"""Strict settings for every test: what is silent elsewhere raises here."""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before JAX starts: eight simulated devices, so that sharding is tested on a
# laptop; and quick compilation, since most time goes into that. The last two
# halve it, but a flag that XLA does not know is fatal.
os.environ.setdefault(
  "XLA_FLAGS",
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
  + (
    " --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
  )
  * importlib.metadata.version("jaxlib").startswith("0.10."),
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
  """One more than there are cores: some tests wait for processes and clocks."""
  return (os.cpu_count() or 1) + 1
