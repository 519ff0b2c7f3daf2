"""Which code generator tests use, on every version of JAX."""

import sys
import types

import jax
import numpy as np
import pytest

from tests import compilation


@pytest.mark.parametrize("module", ["no_such_module", "math"])
def test_a_jax_without_the_private_function_is_left_as_it_is(module):
  compilation.install(module)
  compilation.share_contexts(module)


def test_a_number_of_lowerings_share_a_context(monkeypatch):
  mlir = types.ModuleType("mlir")
  mlir.make_ir_context = object
  monkeypatch.setitem(sys.modules, "mlir", mlir)
  compilation.share_contexts("mlir", lowerings=2)
  contexts = [mlir.make_ir_context() for _ in range(4)]
  assert contexts[0] is contexts[1]
  assert contexts[1] is not contexts[2]
  assert contexts[2] is contexts[3]


def test_jax_lowers_in_shared_contexts():
  def context(size):
    lowered = jax.jit(lambda x: x + 1).lower(np.zeros(size, np.float32))
    return lowered.compiler_ir("stablehlo").context

  shared = [context(size) for size in range(1, 4)]
  assert shared[0] is shared[1] or shared[1] is shared[2]


@pytest.mark.skipif(
  jax.__version_info__ >= (0, 11), reason="JAX has one code generator"
)
@pytest.mark.parametrize("fast", [True, False])
def test_only_programs_without_optimisations_use_the_older_generator(
  fast, monkeypatch
):
  compiler = types.ModuleType("compiler")
  compiler.get_compile_options = lambda: types.SimpleNamespace(
    env_option_overrides=[]
  )
  monkeypatch.setitem(sys.modules, "compiler", compiler)
  compilation.install("compiler")
  jax.config.update("jax_disable_most_optimizations", fast)
  options = compiler.get_compile_options()
  assert bool(options.env_option_overrides) == fast
