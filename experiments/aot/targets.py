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

# The part of a GPU's memory that JAX uses by default.
GPU_SHARE = 0.75
# The package of a platform's compiler, and the extra that installs it.
_COMPILERS = {
  "cuda": ("jax_cuda13_plugin", "aot-cuda"),
  "tpu": ("libtpu", "aot-tpu"),
}
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
  smallest: str  # the smallest topology, of which one device is used
  memory: float  # bytes of a device that a program can use
  bandwidth: float  # bytes per second of a device's memory
  interconnect: float  # bytes per second that a device sends to others
  flops: float  # operations per second in bfloat16
  network: float = 0.0  # bytes per second of a device between machines of GPUs
  clock: float | None = None  # cycles per second of the compiler's estimates

  def devices(self, topology: str | None = None) -> list[Any]:
    """The devices of a topology such as v5e:16x16; one device by default."""
    self.check_installed()
    # These must not search for hardware, nor lock it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
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
    package, extra = _COMPILERS[self.platform]
    if importlib.util.find_spec(package) is None:
      raise UserError(
        f"compiling for {self.name} needs the package {package}: pip"
        f" install -e '.[{extra}]'"
      )


TARGETS = {
  target.name: target
  for target in (
    Target(
      "h100",
      platform="cuda",
      smallest="1x1x1",
      memory=GPU_SHARE * 84_942_979_072,
      bandwidth=3.35e12,
      interconnect=450e9,
      flops=989e12,
      network=50e9,  # an adapter of 400 Gb/s for each GPU
    ),
    Target(
      "v5e",
      platform="tpu",
      smallest="v5e:2x2",
      memory=15.75 * 2**30,
      bandwidth=819e9,
      interconnect=200e9,
      flops=197e12,
      clock=1.5e9,
    ),
    Target(
      "v6e",
      platform="tpu",
      smallest="v6e:2x2",
      memory=31.24 * 2**30,
      bandwidth=1640e9,
      interconnect=400e9,
      flops=918e12,
      clock=1.75e9,
    ),
  )
}


# How many sizes the shape of a topology has, and the largest of each.
_SIZES = {"tpu": (2, 16), "cuda": (3, 1024)}


def target_of(topology: str) -> Target:
  """The target of a topology, such as v5e:16x16; UserError for others."""
  name, _, shape = topology.partition(":")
  sizes = [int(each) for each in shape.split("x") if each.isdecimal()]
  target = TARGETS.get(name)
  number, largest = _SIZES[target.platform] if target else (0, 0)
  is_known = len(shape.split("x")) == len(sizes) == number
  if not target or not is_known or not 1 <= min(sizes) <= max(sizes) <= largest:
    raise UserError(
      f"--topology={topology}: is no topology; write"
      f" {' or '.join(TARGETS)}, a colon and a shape: for TPUs two sizes of 1"
      " to 16, such as v5e:16x16, and for GPUs slices x machines x GPUs, such"
      " as h100:1x1x8"
    )
  return target


def machine_size(topology: str) -> int | None:
  """The number of GPUs of each machine; None if no network joins machines."""
  if target_of(topology).platform == "tpu":
    return None
  slices, machines, devices = map(int, topology.partition(":")[2].split("x"))
  return devices if slices * machines > 1 else None


def _find_cuda_compiler() -> None:
  """Puts ptxas of the CUDA packages on the path."""
  found = importlib.util.find_spec("nvidia")
  for place in (found and found.submodule_search_locations) or ():
    for folder in sorted(pathlib.Path(place).glob("*/bin")):
      path = os.environ.get("PATH", "")
      if str(folder) not in path.split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
