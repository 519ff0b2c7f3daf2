"""Sets up JAX for a run: processes, compilation cache, memory allocator."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import resource
import sys
from importlib.metadata import entry_points
from pathlib import Path

from absl import logging

from experiments.distributed.exit import HEARTBEAT_TIMEOUT, exit_on_abort
from experiments.errors import UserError

_CACHE = "~/.cache/attention-jax"
_CACHE_LIMIT = 2 * 2**30  # bytes
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# On a CPU, programs compile in less time than with XLA's defaults and run as
# fast: see docs/measurements.md.
_QUICK_COMPILATION = (
  "--xla_backend_optimization_level=1",
  "--xla_cpu_parallel_codegen_split_count=2",
)


def set_up_jax() -> None:
  """Sets JAX's options and connects this process to the others, if any."""
  _set_xla_flags()
  import jax

  # The user's own cache is not limited in size.
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = Path(_CACHE).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    reduce_cache(folder, _CACHE_LIMIT)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  # glibc keeps large blocks for the main thread only: see docs/measurements.md.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  _keep_freed_memory()
  address = os.environ.get("JAX_COORDINATOR_ADDRESS")
  if not address:
    return
  _connect(address)
  exit_on_abort()
  if jax.process_index() and not logging.vlog_is_on(1):
    logging.set_verbosity(logging.WARNING)


def _connect(address: str) -> None:
  """Connects this process to the others of JAX_COORDINATOR_ADDRESS."""
  import jax

  initialize = functools.partial(
    jax.distributed.initialize, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT
  )
  if address == "auto":
    # JAX detects the processes, but would use "auto" as an address.
    del os.environ["JAX_COORDINATOR_ADDRESS"]
    try:
      initialize()
    except ValueError as error:
      raise UserError(
        "JAX_COORDINATOR_ADDRESS=auto: JAX finds no cluster here"
        f" ({error}); set host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
      ) from None
    return
  try:
    count = int(os.environ["JAX_NUM_PROCESSES"])
    index = int(os.environ["JAX_PROCESS_ID"])
  except (KeyError, ValueError) as error:
    raise UserError(
      "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and"
      f" JAX_PROCESS_ID must be numbers ({error})"
    ) from None
  if not 0 <= index < count:
    raise UserError(
      f"JAX_PROCESS_ID={index}: must be at least 0 and less than"
      f" JAX_NUM_PROCESSES={count}"
    )
  if not re.fullmatch(r".+:\d+", address):
    raise UserError(
      f"JAX_COORDINATOR_ADDRESS={address}: must be host:port, or auto where JAX"
      " detects the cluster"
    )
  # Detection of Slurm would give each process a single device.
  initialize(address, count, index, cluster_detection_method="deactivate")


def _set_xla_flags() -> None:
  """Adds flags for GPUs or CPUs to XLA_FLAGS, unless it already has them."""
  given = os.environ.get("XLA_FLAGS", "").strip()
  if given and not given.startswith("--"):
    return  # the name of a file with flags
  plugins = {plugin.name for plugin in entry_points(group="jax_plugins")}
  new: list[str] = []
  if any("cuda" in name for name in plugins):
    # Sums by atomic additions and kernels chosen by measurements differ from
    # run to run.
    if "deterministic_ops" not in given:
      new = [_DETERMINISTIC]
  elif not plugins and not importlib.util.find_spec("libtpu"):
    new = [
      flag for flag in _QUICK_COMPILATION if flag.partition("=")[0] not in given
    ]
  os.environ["XLA_FLAGS"] = " ".join([given, *new]).strip()


def reduce_cache(folder: Path, limit: int) -> None:
  """Deletes the least recently used programs above a limit in bytes."""
  # jax_compilation_cache_max_size needs the package filelock, fails on entries
  # that were written without it, and reads all times at every compilation.
  entries = []
  for path in folder.glob("*-cache"):
    with contextlib.suppress(OSError):  # deleted by another process
      status = path.stat()
      used = max(status.st_atime, status.st_mtime)
      entries.append((used, status.st_size, path))
  total = sum(size for _, size, _ in entries)
  for _, size, path in sorted(entries):
    if total <= limit:
      return
    with contextlib.suppress(OSError):
      path.unlink()
    total -= size


def _keep_freed_memory() -> None:
  """Makes glibc keep freed memory instead of returning it to the system."""
  mmap_max, trim_threshold = -4, -1  # of malloc.h
  with contextlib.suppress(OSError, AttributeError):  # another C library
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


def peak_memory() -> int:
  """Returns the peak memory of a device, or of the process, in bytes."""
  import jax

  counted = jax.local_devices()[0].memory_stats()
  if counted:
    return counted["peak_bytes_in_use"]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else 1024 * peak
