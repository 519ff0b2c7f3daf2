"""The sections, the machine, and the memory allocator."""

import datetime
import importlib.metadata
import os
import platform
import sys
from typing import Any

from experiments.cores import num_cores

SECTIONS = (
  "dot",
  "odd",
  "small",
  "causal",
  "window",
  "additive",
  "projected",
  "closure",
  "normalizers",
  "positional",
  "memory",
  "accuracy",
  "curves",
  "heads",
)

_MARK = "ATTENTION_BENCHMARK_RESTARTED"
_TUNABLES = "GLIBC_TUNABLES"
# One arena: those of other threads, such as XLA's, would still return memory.
_KEEP = (
  "glibc.malloc.mmap_max=0"
  ":glibc.malloc.trim_threshold=10000000000"
  ":glibc.malloc.arena_max=1"
)


def restart_keeping_memory() -> None:
  """Restarts this process once, with an allocator that keeps freed memory.

  glibc returns large buffers to the system after each call, and the system
  fills them with zeros, page by page, in the next call. On some machines that
  takes longer than the measured operation, and varies. glibc reads the variable
  that prevents it when a process starts.
  """
  if _MARK in os.environ or platform.libc_ver()[0] != "glibc":
    return
  before = os.environ.get(_TUNABLES)
  os.environ[_MARK] = before or ""
  os.environ[_TUNABLES] = f"{before}:{_KEEP}" if before else _KEEP
  sys.stdout.flush()
  sys.stderr.flush()
  os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ)


def unchanged_environment() -> dict[str, str]:
  """The environment before `restart_keeping_memory`."""
  environment = dict(os.environ)
  before = environment.pop(_MARK, None)
  if before is not None:
    environment.pop(_TUNABLES)
    if before:
      environment[_TUNABLES] = before
  return environment


def allocator() -> str:
  """What the allocator does between calls, as text."""
  if _MARK in os.environ:
    return f"keeps memory between calls ({_TUNABLES}={os.environ[_TUNABLES]})"
  return "may return memory to the system between calls"


def machine() -> dict[str, Any]:
  """The hardware and the versions of packages."""
  return {
    "cpu": _cpu(),
    "cores": num_cores(),
    "system": platform.platform(),
    "python": platform.python_version(),
    **{name: version(name) for name in ("jax", "jaxlib", "torch", "attnax")},
    "load": load(),
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def load() -> float | None:
  """The load average over the last minute."""
  return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def load_line(before: float | None) -> str:
  """The load before the benchmark, with a warning if it is high."""
  if before is None:
    return "load: unknown"
  line = f"load: {before:.2f}"
  if before < 0.5:
    return line
  return (
    f"{line}: other processes use this machine; PyTorch, whose threads "
    "busy-wait for each other, is slowed most"
  )


def version(package: str) -> str | None:
  """The installed version of a package; None if it is not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _cpu() -> str:
  try:
    with open("/proc/cpuinfo") as lines:
      for line in lines:
        if line.startswith("model name"):
          return line.partition(":")[2].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()
