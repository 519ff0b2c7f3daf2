"""The accelerators to compile for, and their topologies without hardware.

TPUs need the package libtpu (the extra `aot-tpu`), GPUs the CUDA plugin and
compiler (`aot-cuda`). Nothing is run: only the compilers of these packages are
used.
"""

import dataclasses
import importlib.util
import os
import pathlib
from typing import Any

import jax

from experiments.errors import UserError

# A GPU's description for XLA, see `xla/tools/hlo_opt/gpu_specs`.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Target:
  """An accelerator, with its published limits."""

  name: str
  platform: str  # of `jax.lax.platform_dependent`
  extra: str  # that installs the compiler
  package: str  # which the extra installs
  smallest: str  # the smallest topology, of which one device is used
  memory: float  # bytes of a device
  bandwidth: float  # bytes per second of a device's memory
  interconnect: float  # bytes per second that a device sends to others
  flops: float  # operations per second in bfloat16
  clock: float | None = None  # cycles per second of the compiler's estimates

  def devices(self, topology: str | None = None) -> list[Any]:
    """The devices of a topology such as v5e:16x16; one device by default."""
    self.check_installed()
    # These must not search for hardware, nor lock it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Nor must the CUDA plugin look for libraries that only running needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    if self.platform == "tpu":
      name = topology or self.smallest
      try:
        named = topologies.get_topology_desc(platform="tpu", topology_name=name)
      except jax.errors.JaxRuntimeError as error:
        raise UserError(f"{name!r} is no slice of TPUs: {error}") from error
      return list(named.devices) if topology else list(named.devices)[:1]
    _find_cuda_compiler()
    shape = topology.partition(":")[2] if topology else self.smallest
    named = topologies.get_topology_desc(
      platform="cuda",
      topology_name=shape,
      target_config=_H100,
      topology=shape,
    )
    return list(named.devices)

  def check_installed(self) -> None:
    """Raises UserError without the compiler for this target."""
    if importlib.util.find_spec(self.package) is None:
      raise UserError(
        f"compiling for {self.name} needs the package {self.package}: pip"
        f" install -e '.[{self.extra}]'"
      )


TARGETS = {
  target.name: target
  for target in (
    Target(
      "h100",
      platform="cuda",
      extra="aot-cuda",
      package="jax_cuda13_plugin",
      smallest="1x1x1",
      memory=80e9,
      bandwidth=3.35e12,
      interconnect=450e9,
      flops=989e12,
    ),
    Target(
      "v5e",
      platform="tpu",
      extra="aot-tpu",
      package="libtpu",
      smallest="v5e:2x2",
      memory=16 * 2**30,
      bandwidth=819e9,
      interconnect=200e9,
      flops=197e12,
      clock=1.5e9,
    ),
    Target(
      "v6e",
      platform="tpu",
      extra="aot-tpu",
      package="libtpu",
      smallest="v6e:2x2",
      memory=32 * 2**30,
      bandwidth=1640e9,
      interconnect=400e9,
      flops=918e12,
      clock=1.75e9,
    ),
  )
}


# How many sizes the shape of a topology has.
_SIZES = {"tpu": (2, 3), "cuda": (3,)}


def target_of(topology: str) -> Target:
  """The target of a topology, such as v5e:16x16; UserError for others."""
  name, _, shape = topology.partition(":")
  sizes = shape.split("x")
  is_known = name in TARGETS and all(map(str.isdecimal, sizes))
  if not is_known or len(sizes) not in _SIZES[TARGETS[name].platform]:
    raise UserError(
      f"--topology={topology}: is no topology; write"
      f" {' or '.join(TARGETS)}, a colon and a shape, such as v5e:16x16; for"
      " GPUs slices x machines x GPUs, such as h100:1x1x8"
    )
  return TARGETS[name]


def _find_cuda_compiler() -> None:
  """Puts ptxas of the CUDA packages on the path."""
  found = importlib.util.find_spec("nvidia")
  for place in (found and found.submodule_search_locations) or ():
    for folder in sorted(pathlib.Path(place).glob("*/bin")):
      path = os.environ.get("PATH", "")
      if str(folder) not in path.split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
