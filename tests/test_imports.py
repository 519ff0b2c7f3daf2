"""The floors of the architecture: a module imports only from floors below."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# From the top down, as in docs/design.md. Those of one floor do not import each
# other.
ATTENTION = (
  ("adapters", "modules"),
  ("multi_head",),
  ("api", "ring"),
  ("dispatch", "merging"),
  ("taylor",),
  ("implementations",),
  ("cache", "request"),
  ("serialization", "types"),
  ("biases", "masks"),
  ("dropout", "normalizers", "positions", "scores"),
  ("positional",),
  ("transforms",),
  ("arrays", "checks", "names"),
)
EXPERIMENTS = (
  ("compare",),
  (
    "train",
    "evaluate",
    "translate",
    "explore",
    "export",
    "analyze_heads",
    "download",
    "plan",
  ),
  ("cli",),
  ("comparison",),
  ("aot", "training", "inference"),
  ("visualization.alignments",),
  ("evaluation",),
  ("checkpoints",),
  ("experiment",),
  ("optimization",),
  ("decoding",),
  ("models",),
  ("distributed",),
  ("data", "visualization"),
  ("run_directory",),
  ("config",),
  ("progress",),
  ("cores", "errors", "hash_rng"),
)
MULTI_HEAD = (
  ("attention",),
  ("bound",),
  ("mesh_axes",),
  ("example_axes", "grouped_query"),
  ("projections",),
)
_HOPPER = "attention.implementations.pallas.hopper"
HOPPER = (
  ("from_request",),
  ("plan",),
  ("local", "problem"),
  ("kernels",),
  ("scores",),
  ("block",),
  ("terms",),
  ("running_sums", "traced"),
  ("tiles",),
)
# The rank of each module or folder on the floors of a package.
RANKS = {
  package: {
    f"{package}.{name}": rank
    for rank, floor in enumerate(floors)
    for name in floor
  }
  for package, floors in (
    ("attention", ATTENTION),
    ("experiments", EXPERIMENTS),
    ("attention.multi_head", MULTI_HEAD),
    (_HOPPER, HOPPER),
  )
}


def modules(package):
  """The files of a package, without its own, which may import lazily."""
  folder = ROOT.joinpath(*package.split("."))
  paths = sorted(folder.rglob("*.py"))
  return [path for path in paths if path != folder / "__init__.py"]


def imported(path):
  """The names of the modules that a file imports."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_name(module, ranks):
  """The longest name of a floor that a module begins with."""
  parts = module.split(".")
  names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
  return next((name for name in names if name in ranks), None)


def module_name(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize(
  ("package", "path"),
  [(package, path) for package in RANKS for path in modules(package)],
  ids=lambda each: each if isinstance(each, str) else module_name(each),
)
def test_a_module_imports_only_from_floors_below(package, path):
  module, ranks = module_name(path), RANKS[package]
  here = floor_name(module, ranks)
  assert here, f"{module} is on no floor"
  for name in imported(path):
    if package != "experiments":
      assert not name.startswith(("experiments", "configs")), module
    there = floor_name(name, ranks)
    if not name.startswith(f"{package}.") or there == here:
      continue
    assert there, f"{name} is on no floor"
    assert ranks[there] > ranks[here], f"{module} imports {name}"


# Packages that a run needs after its first step, if at all.
LATE = ("orbax", "grain", "tensorboardX", "wandb", "matplotlib", "pandas")
LATE += ("sacrebleu", "datasets", "huggingface_hub", "pooch", "scipy")


def test_training_imports_only_what_the_first_step_needs():
  code = "import sys, experiments.train, experiments.training.loop\n"
  code += "print(*{name.partition('.')[0] for name in sys.modules})"
  names = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True
  ).stdout.split()
  assert "flax" in names
  assert not set(LATE) & set(names)
