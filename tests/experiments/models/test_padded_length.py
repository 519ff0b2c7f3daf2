"""Sequences that are padded for the devices of a ring."""

import jax
import jax.numpy as jnp

from attention.modules import MeshAxes
from experiments.config import TransformerConfig
from experiments.models.transformer.options import Options
from tests.meshes import make_mesh


def largest_position(axes):
  options = Options(TransformerConfig(), jnp.float32, axes, max_length=26)
  return options.make_attention(is_self=True).rotary.max_length


def test_rotary_positions_reach_the_padded_length():
  with jax.set_mesh(make_mesh(sequence=8)):
    # Two chunks for each device.
    assert largest_position(MeshAxes(None, "sequence", "zigzag")) == 32
  assert largest_position(MeshAxes()) == 26
