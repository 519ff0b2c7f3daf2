"""Meshes of the simulated devices."""

import math

import jax
from jax.sharding import AxisType


def make_mesh(kind=AxisType.Auto, /, **sizes):
  """A mesh of the first devices, with axes of these sizes."""
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(kind,) * len(sizes),
    devices=jax.devices()[: math.prod(sizes.values())],
  )
