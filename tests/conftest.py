"""Strict settings for every test: what is silent elsewhere raises here."""

import os

# Eight simulated devices, so that every test of sharding runs on a laptop.
# Set before JAX is imported anywhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
