"""Strict settings for every test: what is silent elsewhere raises here."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before JAX is imported: eight simulated devices, so that sharding is tested on
# a laptop; and quick compilation, since most time goes into that.
os.environ.setdefault(
  "XLA_FLAGS",
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
