"""The package as a whole: names, docstrings, imports and its guide."""

import doctest
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys
import types
import typing

import jax
import pytest

import attention
from tests.attention.comparison import jitted

ROOT = pathlib.Path(attention.__file__).parent.parent
PUBLIC_MODULES = ("scores", "masks", "biases", "positions", "cache", "modules")


def public_symbols():
  for name in attention.__all__:
    if name not in PUBLIC_MODULES:
      yield f"attention.{name}", getattr(attention, name)
  for module_name in PUBLIC_MODULES:
    module = importlib.import_module(f"attention.{module_name}")
    for name in module.__all__:
      yield f"{module_name}.{name}", getattr(module, name)


SYMBOLS = dict(public_symbols())
FUNCTIONS = {n: s for n, s in SYMBOLS.items() if inspect.isfunction(s)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_documented_with_an_example(name):
  function = FUNCTIONS[name]
  text = inspect.getdoc(function)
  if inspect.signature(function).parameters:
    assert "\nArgs:\n" in text
  assert "\nReturns:\n" in text
  assert "\nExample:\n" in text
  assert doctest.DocTestParser().get_examples(text)
  for parameter in inspect.signature(function).parameters:
    assert re.search(rf"^  \**{parameter}: ", text, re.MULTILINE), parameter


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "attention." in n])
def test_arrays_in_public_signatures_have_shapes(name):
  """Every array is `Annotated[array, shape]`, and no argument is `Any`."""
  hints = typing.get_type_hints(FUNCTIONS[name], include_extras=True)
  for parameter, hint in hints.items():
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else [hint]
    assert hint is not typing.Any, parameter
    if parameter != "rng":  # a random key has no axes
      assert jax.Array not in parts, parameter


def test_every_public_class_is_documented():
  classes = {n: s for n, s in SYMBOLS.items() if inspect.isclass(s)}
  assert classes
  for name, symbol in classes.items():
    assert symbol.__doc__, name
    assert not symbol.__doc__.startswith(f"{symbol.__name__}("), name


def test_only_public_names_are_attributes():
  assert set(attention.__all__) <= set(dir(attention))
  with pytest.raises(AttributeError, match="nought"):
    attention.nought  # noqa: B018


def test_importing_attention_imports_no_more_than_it_must():
  program = """
import sys
import attention
assert "attention.api" not in sys.modules
attention.attend
heavy = {"flax", "optax", "orbax", "torch", "tensorflow"} & set(sys.modules)
assert not heavy, heavy
from attention.modules import Attention
from attention import merge
import attention.merging
assert callable(attention.merge) and merge is attention.merge
"""
  subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize(
  "guide",
  [
    "adding_a_score",
    "adding_a_mask_or_bias",
    "adding_a_normalizer",
    "from_other_libraries",
  ],
)
def test_guides_run(guide, monkeypatch):
  # As one program each, which takes less time than their operations.
  for name in ("attend", "attention_weights", "dot_product_attention"):
    monkeypatch.setattr(attention, name, jitted(getattr(attention, name)))
  text = (ROOT / "docs" / f"{guide}.md").read_text()
  programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  assert len(programs) >= 2
  namespace: dict = {}
  with jax.numpy_rank_promotion("allow"):  # as readers have it
    for program in programs:
      if "import equinox" not in program or importlib.util.find_spec("equinox"):
        exec(program, namespace)
