"""JAX, set up for a run: its processes, its caches, its memory."""

import contextlib
import ctypes
import functools
import os
import resource
import sys
import time
from pathlib import Path

from absl import logging

from experiments.errors import UserError

_CACHE = "~/.cache/attention-jax"
# The thread that ends a process whose others are gone.
HEARTBEAT = "heartbeat"


def set_up_jax() -> None:
  """Joins the other processes, if any, and keeps compiled code on disk.

  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
  `launch.sh` sets, make a process one of several, and JAX_LOCAL_DEVICE_IDS says
  which of the machine's GPUs it has, all by default; where the address is
  "auto" JAX asks the cluster, as on TPU VMs. JAX_COMPILATION_CACHE_DIR moves
  the cache of compiled code.

  Raises:
    UserError: if there is an address and no number of processes or of this one.

  Example:
    >>> set_up_jax()  # doctest: +SKIP
  """
  import jax

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = str(Path(_CACHE).expanduser())
    jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  _keep_freed_memory()
  address = os.environ.get("JAX_COORDINATOR_ADDRESS")
  if not address:
    return
  if address == "auto":
    del os.environ["JAX_COORDINATOR_ADDRESS"]  # or JAX takes it for one
    jax.distributed.initialize()
  else:
    try:
      count = int(os.environ["JAX_NUM_PROCESSES"])
      index = int(os.environ["JAX_PROCESS_ID"])
    except (KeyError, ValueError) as error:
      raise UserError(
        "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and"
        f" JAX_PROCESS_ID must be numbers ({error})"
      ) from None
    # A scheduler's environment would have a process use one of its devices.
    jax.distributed.initialize(
      address, count, index, cluster_detection_method="deactivate"
    )
  if jax.process_index():
    logging.set_verbosity(logging.WARNING)


def _keep_freed_memory() -> None:
  """Has glibc keep what is freed, as a step frees what the next one needs.

  By default it returns large blocks to the system, which hands them back page
  by page, filled with zeros: up to a quarter of a step on a CPU. Blocks above
  64 MiB it keeps for the main thread alone, hence no dispatch from others.
  """
  mmap_max, trim_threshold = -4, -1  # of malloc.h
  with contextlib.suppress(OSError, AttributeError):  # another C library
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


def coordination_client():
  """Returns JAX's client of the service that all processes share.

  Returns:
    An object with `key_value_set` and `key_value_dir_get`; None for a process
    that is alone.

  Example:
    >>> coordination_client() is None
    True
  """
  from jax._src import distributed  # JAX has no public name for it.

  return distributed.global_state.client


@functools.cache
def linger(seconds: float) -> object:
  """Has C++ wait before it ends the process for an exception nobody caught.

  Where the connection to a dead process breaks, gloo, through which CPUs sum,
  may throw in a thread of its own. Until that brings down this process as
  well, another thread can find out who is dead, say so and leave.

  Args:
    seconds: to wait. Then it ends as it would have at once: with the
      exception's message, by SIGABRT.

  Returns:
    What C++ calls, which the cache keeps; None where it cannot be told to.

  Example:
    >>> linger(20)  # doctest: +SKIP
  """
  handler = ctypes.CFUNCTYPE(None)
  try:
    # std::set_terminate, of the library that JAX is linked with on Linux.
    install = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
  except (OSError, AttributeError):
    return None
  install.argtypes, install.restype = [handler], handler

  @handler
  def terminate() -> None:
    time.sleep(seconds)
    end_at_once()

  end_at_once = install(terminate)
  return terminate


def peak_memory() -> int:
  """Returns how much memory was in use at most, so far.

  Returns:
    Bytes of the first device, where it counts them, otherwise of the process.

  Example:
    >>> peak_memory() > 2**20
    True
  """
  import jax

  counted = jax.local_devices()[0].memory_stats()
  if counted:
    return counted["peak_bytes_in_use"]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else 1024 * peak


def leave(code: int) -> None:
  """Ends the process at once, from whatever thread.

  It waits for nothing that is under way. JAX waits at exit until all processes
  are there, so that the launcher would not hear of a failure before the others,
  which wait for this one, time out; and a save that failed would have Orbax
  tell of each file that it left.

  Args:
    code: to exit with.

  Example:
    >>> leave(1)  # doctest: +SKIP
  """
  try:
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
      sys.stdout.flush()
      sys.stderr.flush()
  finally:
    os._exit(code)
