"""Every public function and class of the experiments says what it is."""

import dataclasses
import importlib
import inspect
import pkgutil
import re

import pydantic
import pytest

import experiments

# They define flags of the same name, so one process holds only one of them.
BINARIES = (
  "experiments.train",
  "experiments.compare",
  "experiments.analyze_heads",
  "experiments.evaluate",
  "experiments.translate",
)
OF_FLAX = ("parent", "name")


def public_symbols():
  found = pkgutil.walk_packages(experiments.__path__, "experiments.")
  for name in sorted(module.name for module in found):
    if name in BINARIES:
      continue
    module = importlib.import_module(name)
    for symbol_name, symbol in vars(module).items():
      here = getattr(symbol, "__module__", None) == name
      if here and not symbol_name.startswith("_"):
        yield f"{name}.{symbol_name}", symbol


SYMBOLS = dict(public_symbols())
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


def is_protocol(symbol):
  return getattr(symbol, "_is_protocol", False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_args_returns_and_example(name):
  text = inspect.getdoc(FUNCTIONS[name]) or ""
  signature = inspect.signature(FUNCTIONS[name])
  assert undescribed(signature.parameters, section(text, "Args")) == []
  if signature.return_annotation is not None:
    assert section(text, "Returns") or section(text, "Yields")
  assert ">>>" in section(text, "Example")


@pytest.mark.parametrize("name", CLASSES)
def test_class_has_attributes_and_example(name):
  symbol = CLASSES[name]
  text = inspect.cleandoc(symbol.__doc__ or "")
  assert text
  assert not text.startswith(f"{symbol.__name__}("), "a generated docstring"
  assert undescribed(field_names(symbol), section(text, "Attributes")) == []
  # A record shows in the examples of what takes it, an error in its message, a
  # protocol in what keeps to it.
  records = (tuple, pydantic.BaseModel, Exception)
  if not issubclass(symbol, records) and not is_protocol(symbol):
    assert ">>>" in section(text, "Example")


def test_the_walk_finds_the_modules():
  assert {
    "experiments.cli.run",
    "experiments.training.loop.train_and_evaluate",
    "experiments.models.make_model",
    "experiments.data.synthetic.tasks.reverse",
  } <= set(FUNCTIONS)
  assert "experiments.optimization.step.TrainState" in CLASSES
