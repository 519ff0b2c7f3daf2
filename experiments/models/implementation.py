"""The implementation of attention that a config names."""

import dataclasses

import jax
from flax import linen as nn

from attention.arrays.softmax import Statistics
from attention.implementations import BY_NAME, Implementation
from attention.request import Request
from experiments.errors import UserError


@dataclasses.dataclass(frozen=True)
class Named:
  """An implementation of `attention`; its errors name the config's field."""

  name: str

  def obstacle(self, request: Request) -> str | None:
    """None; raises UserError if the implementation cannot serve a request."""
    reason = BY_NAME[self.name].obstacle(request)
    if self.name == "pallas" and _is_partitioned_by_xla():
      reason = (
        "needs one device, or a Transformer, as XLA does not divide kernels"
        " over config.mesh"
      )
    if reason:
      raise UserError(
        f"config.model.attention_implementation: {self.name!r} cannot compute"
        f" the attention of this model: it {reason}; 'auto' chooses an"
        " implementation that can"
      )
    return None

  def __call__(
    self, request: Request
  ) -> tuple[jax.Array, Statistics | jax.Array | None]:
    """What the implementation returns."""
    return BY_NAME[self.name](request)


def _is_partitioned_by_xla() -> bool:
  """Whether XLA divides the program over several devices of the mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


def of_sequences(model: nn.Module) -> Implementation | None:
  """Returns the argument `implementation` of `attend` for whole sequences."""
  name = model.config.attention_implementation
  # Initial parameters do not depend on it, and are computed on any platform.
  return None if name == "auto" or model.is_initializing() else Named(name)
