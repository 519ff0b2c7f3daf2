"""Strict settings for every test, and one compilation cache for all processes.

`tests/compilation.py` lists the tests that compile with XLA's default settings.
"""

import gc
import os
import pathlib

# Variables rather than `jax.config`, so that started processes inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight simulated devices: sharding is tested without accelerators.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Workers, started processes and later runs share compiled programs.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  str(pathlib.Path(__file__).parent / ".pytest_cache" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest

from experiments.distributed.initialize import reduce_cache
from tests import compilation

_ROOT = pathlib.Path(__file__).parent
_CACHE = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
_CACHE_LIMIT = 2 * 2**30  # bytes
_MEMORY_LIMIT = 1.5 * 2**30  # bytes
# These files take longest by default, so they start first.
_LONG_FILES = (
  "test_jax_tools.py",
  "test_attention_variants.py",
  "test_train.py",
  "test_hopper_parameters.py",
  "test_attend_values.py",
  "test_hopper_sinusoids.py",
  "test_hopper_nan.py",
  "test_resume.py",
  "test_faults.py",
  "test_models.py",
  "test_translate.py",
)

jax.config.update("jax_numpy_rank_promotion", "raise")
compilation.install()
compilation.share_contexts()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
  """One worker more than cores, because tests wait for processes they start."""
  return (os.cpu_count() or 1) + 1


def pytest_configure(config):
  """Limits the size of the cache, once for all workers."""
  if not hasattr(config, "workerinput"):
    reduce_cache(_CACHE, _CACHE_LIMIT)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Moves the longest files to the front; marks the story as exhaustive."""

  def rank(item):
    path = item.path.as_posix()
    ranks = [i for i, end in enumerate(_LONG_FILES) if path.endswith(end)]
    return min(ranks, default=len(_LONG_FILES))

  items.sort(key=rank)
  for item in items:
    if item.path.name == "story.md":  # a document has no decorators
      item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish(session):
  """Excludes modules and tests, which live on, from garbage collection."""
  del session
  gc.freeze()
  gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
  """Chooses how programs are compiled before any fixture compiles one."""
  compilation.choose(item.path.relative_to(_ROOT).as_posix())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
  """Releases the compiled programs of a file, which hold a worker's memory.

  Files whose programs need little memory share those of single operations.
  """
  if nextitem is None or nextitem.path == item.path:
    return
  paths = [each.path.relative_to(_ROOT).as_posix() for each in (item, nextitem)]
  before, after = map(compilation.fast, paths)
  if before != after or _resident() > _MEMORY_LIMIT:
    jax.clear_caches()


def _resident():
  """Bytes of this process in memory; infinitely many without /proc."""
  try:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  except FileNotFoundError:
    return float("inf")
  return pages * os.sysconf("SC_PAGE_SIZE")
