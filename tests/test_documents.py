"""Commands, links and code in the documents."""

import json
import pathlib
import re

import pytest

from configs import base
from docs.config_fields import config_fields
from experiments.config.sections import Section

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_readme_shows_the_two_commands_that_ci_runs():
  commands = re.findall(r"^ +(pip install -e.*)$", README, re.MULTILINE)
  assert commands == [
    "pip install -e '.[experiments]' && python -m experiments.train"
    " --config=configs/reverse.py",
    "pip install -e '.[test]' && pytest -n auto",
  ]
  assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_container_runs_the_commands_of_readme():
  dockerfile = (ROOT / "Dockerfile").read_text()
  (extras,) = re.findall(r"^ARG EXTRAS=(\w+)$", dockerfile, re.MULTILINE)
  (command,) = re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE)
  assert 'pip install --no-cache-dir -e ".[$EXTRAS]"' in dockerfile
  assert (
    f"pip install -e '.[{extras}]' && {' '.join(json.loads(command))}" in README
  )
  development = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
  assert json.loads(development)["build"]["args"] == {"EXTRAS": "test"}


def test_readme_code_runs():
  names: dict = {}
  for program in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
    exec(program, names)
  assert names["context"].shape == (2, 8, 5, 64)
  assert names["weights"].shape == (2, 8, 5, 7)
  assert names["run"].config.data.name == "numbers"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_configs_in_documents_exist(path):
  text = path.read_text()
  for link in re.findall(r"\]\((?!http)([^)#]+)", text):
    assert (path.parent / link).exists(), link
  for name, arg in re.findall(r"(configs/\w+\.py)(?::(\w+))?", text):
    assert (ROOT / name).exists(), name
    assert not arg or arg in base.ARGUMENTS, arg


def test_every_field_of_a_config_is_documented():
  text = config_fields()
  sections = [Section]
  for section in sections:
    sections += section.__subclasses__()
    for field in section.model_fields:
      assert f"| `{field}`" in text or f"\n## config.{field}\n" in text, field
  for row in (
    "| `clip_norm` | number above `0` or None | `1.0` | Largest global norm",
    '| `cell` | `"gru"`, `"lstm"` | `"gru"` | Type of',
    "| `dropout_rate` | number at least `0` and below `1` | `0.0` |",
    "| `beam_size`\\* | integer at least `1` and at most `4096` | `1` |",
    "| `splits` | names, each with [DigitRange](#digitrange) |",
    "| `min_digits` | integer at least `1` | required |",
  ):
    assert f"\n{row}" in text


def anchors(path):
  """The anchors of a document's headings, as GitHub and Sphinx make them."""
  headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
  words = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
  return {each.strip().replace(" ", "-") for each in words}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_headings_that_links_name_exist(path):
  links = re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", path.read_text())
  for file, anchor in links:
    target = path.parent / file if file else path
    assert anchor in anchors(target), f"{file}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_modules_named_in_documents_exist(path):
  for name in re.findall(r"python -m ([\w.]+)", path.read_text()):
    if name.startswith(("experiments", "benchmarks")) and name.islower():
      place = ROOT / name.replace(".", "/")
      module, package = place.with_suffix(".py"), place / "__main__.py"
      assert module.exists() or package.exists(), name


def test_files_that_the_page_of_kernels_lists_are_those_of_the_folder():
  _, listed = (ROOT / "docs/kernels.md").read_text().split("## Files\n")
  names = re.findall(r"^ +(\w+\.py) ", listed, re.MULTILINE)
  folder = ROOT / "attention/implementations/pallas"
  modules = [path.name for path in folder.rglob("*.py")]
  assert sorted(names) == sorted(n for n in modules if n != "__init__.py")
