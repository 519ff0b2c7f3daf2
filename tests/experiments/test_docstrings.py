"""What a package of the experiments exports is documented in full."""

import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import re

import pydantic
import pytest

import experiments

ROOT = pathlib.Path(__file__).parents[2]
# Arguments that only a trained run provides: tests show those functions.
A_RUN = {"workdir", "experiment", "restored"}
OF_FLAX = ("parent", "name")


def exported_symbols():
  """What the packages list in `__all__`, by name."""
  for module in pkgutil.walk_packages(experiments.__path__, "experiments."):
    if module.ispkg:
      package = importlib.import_module(module.name)
      for name in getattr(package, "__all__", ()):
        yield f"{module.name}.{name}", getattr(package, name)


SYMBOLS = dict(exported_symbols())
FUNCTIONS = {n: s for n, s in SYMBOLS.items() if inspect.isfunction(s)}
CLASSES = {n: s for n, s in SYMBOLS.items() if inspect.isclass(s)}


def section(text, title):
  """The indented lines under a title such as `Args:`, or ""."""
  found = re.search(rf"^{title}:\n((?:(?:  .*)?\n?)*)", text, re.MULTILINE)
  return found[1] if found else ""


def undescribed(names, lines):
  return [n for n in names if not re.search(rf"(?m)^  \**{n}: \S", lines)]


def field_names(symbol):
  if dataclasses.is_dataclass(symbol):
    names = [field.name for field in dataclasses.fields(symbol)]
    return [name for name in names if name not in OF_FLAX]
  return getattr(symbol, "_fields", ())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exported_function_documents_arguments_result_and_example(name):
  text = inspect.getdoc(FUNCTIONS[name]) or ""
  signature = inspect.signature(FUNCTIONS[name])
  assert undescribed(signature.parameters, section(text, "Args")) == []
  if signature.return_annotation is not None:
    assert section(text, "Returns") or section(text, "Yields")
  if not A_RUN & set(signature.parameters):
    assert ">>>" in section(text, "Example")


@pytest.mark.parametrize("name", CLASSES)
def test_exported_class_documents_attributes_and_example(name):
  symbol = CLASSES[name]
  text = inspect.cleandoc(symbol.__doc__ or "")
  assert text
  assert not text.startswith(f"{symbol.__name__}("), "a generated docstring"
  assert undescribed(field_names(symbol), section(text, "Attributes")) == []
  # The function that takes a record or raises an error shows it; a protocol has
  # no instances.
  without_example = (tuple, pydantic.BaseModel, Exception)
  if not issubclass(symbol, without_example) and not getattr(
    symbol, "_is_protocol", False
  ):
    assert ">>>" in section(text, "Example")


def test_packages_export_symbols():
  assert FUNCTIONS
  assert CLASSES


def test_every_example_runs():
  skip = "+" + "SKIP"
  paths = [
    path
    for folder in ("attention", "experiments", "configs", "benchmarks", "docs")
    for pattern in ("*.py", "*.md")
    for path in (ROOT / folder).rglob(pattern)
  ]
  skipping = [p for p in paths if skip in p.read_text(encoding="utf-8")]
  assert skipping == []
