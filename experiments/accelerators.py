"""Accelerators and their links, as their makers publish them."""

from typing import NamedTuple

from experiments.errors import UserError


class Accelerator(NamedTuple):
  """A kind of device and how many of them are joined.

  Attributes:
    name: of the device.
    bfloat16: operations a second of matrix products, at most.
    float32: likewise, of float32 arrays at JAX's default precision, which is
      TF32 on GPUs and bfloat16 on TPUs.
    memory: bytes.
    near: bytes a second that a device sends along one axis of a mesh, to
      devices of its own domain.
    domain: devices that are joined so.
    far: bytes a second a device sends to other domains.
    source: where the figures are published.
  """

  name: str
  bfloat16: float
  float32: float
  memory: float
  near: float
  domain: int
  far: float
  source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_GOOGLE = "https://docs.cloud.google.com/tpu/docs/"

# Of a GPU, NVLink in one direction, and one network adapter of a DGX for each;
# of a TPU two of its ports, one for each way around a ring of the torus.
_KINDS = (
  Accelerator("a100", 312e12, 156e12, 80e9, 300e9, 8, 25e9, _NVIDIA + "a100/"),
  Accelerator("h100", 989e12, 494e12, 80e9, 450e9, 8, 50e9, _NVIDIA + "h100/"),
  Accelerator("h200", 989e12, 494e12, 141e9, 450e9, 8, 50e9, _NVIDIA + "h200/"),
  Accelerator("v5e", 197e12, 197e12, 16e9, 100e9, 256, 3.1e9, _GOOGLE + "v5e"),
  Accelerator("v5p", 459e12, 459e12, 95e9, 200e9, 8960, 6e9, _GOOGLE + "v5p"),
)
ACCELERATORS = {kind.name: kind for kind in _KINDS}


def accelerator(name: str) -> Accelerator:
  """Returns a kind of device by its name.

  Args:
    name: of `ACCELERATORS`.

  Returns:
    What is published of it.

  Raises:
    UserError: if the name is unknown.

  Example:
    >>> accelerator("h100").domain
    8
  """
  if name not in ACCELERATORS:
    raise UserError(
      f"--accelerator: unknown {name!r}; known: {', '.join(ACCELERATORS)}"
    )
  return ACCELERATORS[name]


def bandwidth(
  accelerator: Accelerator, size: int, inner: int, *, ring: bool = False
) -> float:
  """Returns how fast a device sends along an axis of a mesh.

  Neighbours along the last axis are closest, so a domain is filled with the
  inner axes first. Where an axis leaves the domain, those of its devices that
  share one sum among themselves and then send a part each.

  Args:
    accelerator: the kind of device.
    size: of the axis.
    inner: the product of the axes after it.
    ring: whether each device has its own to pass on, so that nothing can be
      summed before it leaves the domain.

  Returns:
    Bytes a second.

  Example:
    >>> gpu = accelerator("h100")
    >>> [bandwidth(gpu, 64, inner) / 1e9 for inner in (1, 4, 8)]
    [400.0, 100.0, 50.0]
  """
  together = max(accelerator.domain // inner, 1)
  if together >= size:
    return accelerator.near
  if ring:
    return accelerator.far
  return min(accelerator.near, together * accelerator.far)
