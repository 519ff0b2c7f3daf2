"""The floors of the architecture: a module imports only from floors below."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# From the top down, as in docs/design.md. Those of one floor do not import each
# other.
FLOORS = (
  ("compare",),
  ("train", "evaluate", "translate", "analyze_heads", "download"),
  ("cli",),
  ("comparison",),
  ("training", "inference"),
  ("visualization.alignments",),
  ("evaluation",),
  ("checkpoints",),
  ("experiment",),
  ("optimization",),
  ("decoding",),
  ("models",),
  ("distributed",),
  ("data",),
  ("run_directory",),
  ("config",),
  ("visualization",),
  ("progress",),
  ("errors",),
)
RANKS = {name: rank for rank, floor in enumerate(FLOORS) for name in floor}


def modules(package):
  return sorted((ROOT / package).rglob("*.py"))


def imported(path):
  """The names of the modules that a file imports."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_name(module):
  """The longest name of FLOORS that a module of `experiments` begins with."""
  _, *parts = module.split(".")
  names = (".".join(parts[:length]) for length in (2, 1))
  return next((name for name in names if name in RANKS), None)


def module_name(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", modules("experiments"), ids=module_name)
def test_a_module_imports_only_from_floors_below(path):
  module = module_name(path)
  if module == "experiments":
    return
  here = floor_name(module)
  assert here, f"{module} is on no floor"
  for name in imported(path):
    if not name.startswith("experiments."):
      continue
    there = floor_name(name)
    if there == here:
      continue
    assert RANKS[there] > RANKS[here], f"{module} imports {name}"


@pytest.mark.parametrize("path", modules("attention"), ids=module_name)
def test_attention_does_not_import_experiments(path):
  assert not [name for name in imported(path) if name.startswith("experiments")]
