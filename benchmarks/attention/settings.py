"""How the benchmark runs, and on what."""

import datetime
import importlib.metadata
import os
import platform
import sys
from typing import Any

SECTIONS = (
  "dot",
  "small",
  "causal",
  "window",
  "additive",
  "projected",
  "closure",
  "memory",
  "accuracy",
  "curves",
  "heads",
)

_MARK = "ATTENTION_BENCHMARK_RESTARTED"
_TUNABLES = "GLIBC_TUNABLES"
# One arena: those of other threads, among them XLA's, return memory still.
_KEEP = (
  "glibc.malloc.mmap_max=0"
  ":glibc.malloc.trim_threshold=10000000000"
  ":glibc.malloc.arena_max=1"
)


def cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def restart_keeping_memory() -> None:
  """Restarts this process once, with an allocator that returns nothing.

  glibc gives large buffers back to the system after each call and has them
  filled with zeros, page by page, in the next. On some machines that takes
  longer than what is measured, and not always, for all contenders alike. The
  variable that ends it is read as a process starts.
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
  """The environment as it was before `restart_keeping_memory`."""
  environment = dict(os.environ)
  before = environment.pop(_MARK, None)
  if before is not None:
    environment.pop(_TUNABLES)
    if before:
      environment[_TUNABLES] = before
  return environment


def allocator() -> str:
  """What the allocator does between calls, in words."""
  if _MARK in os.environ:
    return f"keeps memory between calls ({_TUNABLES}={os.environ[_TUNABLES]})"
  return "returns memory to the system between calls, as it likes"


def machine() -> dict[str, Any]:
  """What the figures depend on beyond the code."""
  return {
    "cpu": _cpu(),
    "cores": cores(),
    "system": platform.platform(),
    "python": platform.python_version(),
    **{name: version(name) for name in ("jax", "jaxlib", "torch", "attnax")},
    "load": load(),
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def load() -> float | None:
  """How many processes wanted a core in the last minute."""
  return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def load_line(before: float | None) -> str:
  """The load before the benchmark began, with a warning if there was any."""
  if before is None:
    return "load: unknown"
  line = f"load: {before:.2f}"
  if before < 0.5:
    return line
  return (
    f"{line}: others use this machine; PyTorch, whose threads wait for each "
    "other in a loop, loses most"
  )


def version(package: str) -> str | None:
  """The installed version of a package, None if there is none."""
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
