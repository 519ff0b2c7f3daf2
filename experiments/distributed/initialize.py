"""Sets up JAX for a run: processes, compilation cache, memory allocator."""

import contextlib
import ctypes
import functools
import os
import resource
import signal
import sys
import time
from pathlib import Path

from absl import logging

from experiments.errors import UserError

_CACHE = "~/.cache/attention-jax"
_CACHE_LIMIT = 2 * 2**30  # bytes
# Seconds without a heartbeat after which JAX declares a process dead.
HEARTBEAT_TIMEOUT = 15
# Seconds for which a process that fails waits for others that fail as well.
_GRACE = 5.0
# Whether this process has reported an error of its own and is exiting.
_exiting = False


def set_up_jax() -> None:
  """Connects to the other processes, if any, and sets JAX's options.

  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
  `launch.sh` sets, make this process one of several. JAX_LOCAL_DEVICE_IDS
  selects GPUs of the machine (default: all). With the address "auto", JAX asks
  the cluster, as on TPU VMs. The compilation cache, ~/.cache/attention-jax, is
  reduced to 2 GiB; JAX_COMPILATION_CACHE_DIR names another directory, whose
  size is not limited.
  """
  import jax

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = Path(_CACHE).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    reduce_cache(folder, _CACHE_LIMIT)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  _keep_freed_memory()
  address = os.environ.get("JAX_COORDINATOR_ADDRESS")
  if not address:
    return
  initialize = functools.partial(
    jax.distributed.initialize, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT
  )
  if address == "auto":
    # JAX would use the value "auto" as an address.
    del os.environ["JAX_COORDINATOR_ADDRESS"]
    initialize()
  else:
    try:
      count = int(os.environ["JAX_NUM_PROCESSES"])
      index = int(os.environ["JAX_PROCESS_ID"])
    except (KeyError, ValueError) as error:
      raise UserError(
        "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and"
        f" JAX_PROCESS_ID must be numbers ({error})"
      ) from None
    # Cluster detection would give each process one device of a Slurm job.
    initialize(address, count, index, cluster_detection_method="deactivate")
  _exit_on_abort()
  if jax.process_index() and not logging.vlog_is_on(1):
    logging.set_verbosity(logging.WARNING)


def reduce_cache(folder: Path, limit: int) -> None:
  """Deletes the least recently used programs above a limit in bytes.

  JAX's own limit, jax_compilation_cache_max_size, needs the package filelock,
  fails on entries that were written without a limit, and reads all entries'
  times at every compilation.
  """
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
  """Makes glibc keep freed memory instead of returning it to the system.

  The system hands pages back filled with zeros, which took up to a quarter of
  a step on a CPU. glibc keeps blocks above 64 MiB for the main thread only,
  so asynchronous dispatch is off.
  """
  mmap_max, trim_threshold = -4, -1  # of malloc.h
  with contextlib.suppress(OSError, AttributeError):  # another C library
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


def coordination_client():
  """Returns JAX's client of the coordination service, None if there is none."""
  if "jax" not in sys.modules:
    return None
  from jax._src import distributed  # JAX has no public name for it.

  return distributed.global_state.client


@functools.cache  # which keeps the callbacks alive
def _exit_on_abort() -> tuple[object, ...]:
  """Replaces SIGABRT by one message and exit code 1.

  JAX aborts a process when another one dies, after a message that names it.
  gloo, the CPU's collectives, may detect the broken connection first and throw
  in its own thread: that thread then waits for JAX's message.
  """
  abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
  terminate_handler = ctypes.CFUNCTYPE(None)

  @abort_handler
  def on_abort(_) -> None:
    try:
      if _exiting:  # with a message and a code of its own
        time.sleep(2 * _GRACE)
      else:
        report(
          "JAX stopped this process, in most cases because another process"
          " died; JAX's messages above name it (the leader is process 0)"
        )
    finally:
      os._exit(1)

  @terminate_handler
  def on_terminate() -> None:
    time.sleep(HEARTBEAT_TIMEOUT + 2 * _GRACE)
    default()  # shows the exception and aborts

  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, abort_handler]
  libc.signal(signal.SIGABRT, on_abort)
  with contextlib.suppress(OSError, AttributeError):
    # std::set_terminate, of the library that JAX is linked with on Linux.
    install = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    install.argtypes, install.restype = [terminate_handler], terminate_handler
    default = install(on_terminate)
  return on_abort, on_terminate


def report(trouble: str) -> None:
  """Prints why this process, one of several, stops."""
  from jax._src import distributed  # jax.process_index() waits for a backend

  index = distributed.global_state.process_id
  with contextlib.suppress(OSError, ValueError):  # standard error is closed
    print(
      f"error: process {index}: {trouble}. The same command"
      " resumes from the last checkpoint.",
      file=sys.stderr,
      flush=True,
    )


def peak_memory() -> int:
  """Returns the peak memory of a device, or of the process, in bytes."""
  import jax

  counted = jax.local_devices()[0].memory_stats()
  if counted:
    return counted["peak_bytes_in_use"]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else 1024 * peak


def leave(code: int) -> None:
  """Ends the process at once, from any thread.

  `sys.exit` would wait for the other processes in JAX's exit handler, and for
  Orbax's threads. Processes that fail for the same reason leave together: JAX
  aborts the others when the first process, the coordinator, is gone.
  """
  global _exiting
  _exiting = True
  try:
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
      sys.stdout.flush()
      sys.stderr.flush()
    if client := coordination_client():
      with contextlib.suppress(Exception):
        client.wait_at_barrier("leave", round(1000 * _GRACE))
  finally:
    os._exit(code)
