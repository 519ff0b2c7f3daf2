"""Kernels are lowered for GPUs and TPUs, which checks each of their operations.

This needs neither a device nor its compiler.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from attention import masks, normalizers
from attention.implementations import Pallas
from tests.attention.implementations.pallas import hopper
from tests.attention.implementations.pallas.test_hopper_normalizers import (
  NORMALIZERS,
)
from tests.matrix import sampled_product

# JAX 0.12 asks for the kind of TPU that a program is lowered for.
DEVICES = {
  "cuda": AbstractDevice("NVIDIA H100", None, "cuda"),
  "tpu": AbstractDevice("TPU v5 lite", 1, "tpu"),
}
KERNELS = {"cuda": Pallas(target="hopper"), "tpu": Pallas(target="tpu")}
CASES = {
  **hopper.CASES,
  **hopper.MASKED,
  **{name: {"normalizer": each} for name, each in NORMALIZERS.items()},
  "padding": {"mask": masks.padding(jnp.asarray([70, 0]))},
  "causal entmax": {"normalizer": normalizers.entmax(), **hopper.CAUSAL},
  "64 bits": hopper.WIDE,
  "dropout": {"dropout_rate": 0.2, "rng": jax.random.key(0)},
}


@sampled_product(
  ("name", "platform"),
  (CASES, KERNELS),
  default=[
    ("causal entmax", "cuda"),
    ("dropout", "cuda"),
    ("64 bits", "cuda"),
    ("causal entmax", "tpu"),
    ("forgetting", "tpu"),
    ("64 bits", "tpu"),
  ],
)
def test_gradients_are_lowered(name, platform):
  tokens = [
    jax.ShapeDtypeStruct((2, length, 64), jnp.bfloat16)
    for length in (50, 100, 100)
  ]
  options = dict(CASES[name])
  pulled = hopper.pulled_back if "normalizer" in options else hopper.results
  gradient = jax.jit(
    lambda *tokens: pulled(KERNELS[platform], [*tokens], **options)
  )
  mesh = AbstractMesh((1,), ("x",), abstract_device=DEVICES[platform])
  with (
    jax.enable_x64(name == "64 bits"),
    jax.sharding.use_abstract_mesh(mesh),
  ):
    gradient.trace(*tokens).lower(lowering_platforms=(platform,))
