"""Which code generator tests use, on every version of JAX."""

import sys
import types

import jax
import pytest

from tests import compilation


@pytest.mark.parametrize("module", ["no_such_module", "math"])
def test_a_jax_without_the_private_function_is_left_as_it_is(module):
  compilation.install(module)


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
