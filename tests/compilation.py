"""Which tests compile with the settings of users, and which for speed.

Tests of numbers compile as XLA does by default. The others test configs, files,
commands, the order of steps, shardings, layers built on `attend`, and that
tokens which must not matter do not. Most of their time would be compilation, so
XLA skips its optimisations.
"""

import functools
import importlib
import threading

import jax

# Folders and files whose tests compile with XLA's default settings. Programs
# that run for longer than they compile are among them.
DEFAULT_SETTINGS = (
  "tests/attention/implementations/blockwise/test_memory.py",
  "tests/attention/implementations/blockwise/test_numerics.py",
  "tests/attention/test_attend_values.py",
  "tests/attention/test_merging.py",
  "tests/attention/test_score_precision.py",
  "tests/attention/test_torch_peers.py",
  "tests/experiments/test_learning.py",
  "tests/test_compiler.py",
)
# What a started process needs to compile as this process does for speed.
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def fast(path: str) -> bool:
  """Whether tests of a file, relative to the repository, are compiled fast."""
  return not path.startswith(DEFAULT_SETTINGS)


def choose(path: str) -> None:
  """Sets JAX for the tests of a file, a path relative to the repository."""
  jax.config.update("jax_disable_most_optimizations", fast(path))


def share_contexts(
  module: str = "jax._src.interpreters.mlir", lowerings: int = 50
) -> None:
  """Lets consecutive lowerings of a thread share a context of MLIR.

  JAX makes a context for each program, which takes a third of the time of a
  program of one operation. A context keeps all constants of its programs, so
  another one is made after `lowerings` programs. The function is private;
  without it tests only take longer.
  """
  try:
    mlir = importlib.import_module(module)
    make = mlir.make_ir_context
  except (ImportError, AttributeError):
    return
  shared = threading.local()

  @functools.wraps(make)
  def make_ir_context():
    if not getattr(shared, "left", 0):
      shared.context, shared.left = make(), lowerings
    shared.left -= 1
    return shared.context

  mlir.make_ir_context = make_ir_context


def install(module: str = "jax._src.compiler") -> None:
  """Makes programs without optimisations use XLA's older code generator.

  It takes a third of the time. JAX 0.10 has both, and chooses in a private
  function; without that function tests compile slower, and pass all the same.
  """
  if jax.__version_info__ >= (0, 11):
    return
  try:
    compiler = importlib.import_module(module)
    make = compiler.get_compile_options
  except (ImportError, AttributeError):
    return

  def compile_options(*args, **kwargs):
    options = make(*args, **kwargs)
    if jax.config.read("jax_disable_most_optimizations"):
      options.env_option_overrides += [("xla_cpu_use_fusion_emitters", False)]
    return options

  compiler.get_compile_options = compile_options
