"""Mistakes on the command line: one message, an exit code, no traceback."""

import os

import pytest

from tests.experiments import processes

pytestmark = pytest.mark.slow

# The tests run on three devices, over which no default batch divides.
DIVIDES = "--config.train.batch_size=3"

MISTAKES = {
  "no config": (["train"], "--config is required"),
  "no such file": (
    ["train", "--config=configs/revrse.py"],
    "configs/reverse.py",
  ),
  "no get_config": (
    ["train", "--config={tmp}/empty.py"],
    "has no get_config",
  ),
  "syntax error": (["train", "--config={tmp}/broken.py"], "broken.py"),
  "raises": (["train", "--config={tmp}/raises.py"], "raises.py, line 2"),
  "unknown argument": (
    ["train", "--config=configs/reverse.py:dott"],
    "known: none, dot, scaled_dot, general, additive, concat, cosine",
  ),
  "misspelt field": (
    ["train", "--config=configs/reverse.py", "--config.train.step=3"],
    "config.train.step",
  ),
  "misspelt section": (
    ["train", "--config=configs/reverse.py", "--config.trian.steps=3"],
    "trian",
  ),
  "wrong type": (
    ["train", "--config=configs/reverse.py", "--config.train.steps=many"],
    "config.train.steps",
  ),
  "out of range": (
    ["train", "--config=configs/reverse.py", "--config.train.steps=0"],
    "config.train.steps: got 0; ",
  ),
  "returns a dictionary": (
    ["train", "--config={tmp}/dictionary.py"],
    "get_config returned dict, not an ml_collections.ConfigDict",
  ),
  "returns nothing": (
    ["train", "--config={tmp}/nothing.py"],
    "get_config returned NoneType",
  ),
  "misspelt in the file": (
    ["train", "--config={tmp}/typo.py"],
    "config.train.stepz: no such field; did you mean 'steps'?",
  ),
  "unknown flag": (
    ["train", "--config=configs/reverse.py", "--worddir=x"],
    "worddir",
  ),
  "stray word": (["train", "--config=configs/reverse.py", "fast"], "'fast'"),
  "not writable": (
    ["train", "--config=configs/reverse.py", DIVIDES, "--workdir=/proc/x"],
    "--workdir=/proc/x: cannot be written",
  ),
  "a file as workdir": (
    [
      "train",
      "--config=configs/reverse.py",
      DIVIDES,
      "--workdir={tmp}/empty.py",
    ],
    "cannot be written",
  ),
  "too many devices": (
    [
      "train",
      "--config=configs/reverse.py",
      "--workdir={tmp}/many",
      "--config.mesh.data=64",
    ],
    "config.mesh: 64 data are 64 devices, but there are 3",
  ),
  "batch does not divide": (
    ["train", "--config=configs/reverse.py", "--workdir={tmp}/divide"],
    "config.train.batch_size",
  ),
  "evaluate: not a run": (
    ["evaluate", "--workdir={tmp}"],
    "not a run directory",
  ),
  "evaluate: no workdir": (["evaluate"], "--workdir"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake, tmp_path):
  (tmp_path / "empty.py").write_text("")
  (tmp_path / "broken.py").write_text("def get_config(:\n")
  (tmp_path / "raises.py").write_text("def get_config(arg=''):\n  1 / 0\n")
  (tmp_path / "nothing.py").write_text("def get_config(arg=''):\n  pass\n")
  (tmp_path / "dictionary.py").write_text(
    "def get_config(arg=''):\n  return {'seed': 0}\n"
  )
  (tmp_path / "typo.py").write_text(
    "from configs import base\n"
    "def get_config(arg=''):\n"
    "  config = base.get_config(arg)\n"
    "  config.train.stepz = 3\n"
    "  return config\n"
  )
  arguments, message = MISTAKES[mistake]
  arguments = [each.format(tmp=tmp_path) for each in arguments]
  code, out, error = processes.run(*arguments, devices=3)
  assert code == 2, error
  assert message in error
  assert "Traceback" not in error
  assert error.startswith("error: ")
  assert len(error.splitlines()) <= 4, error
  assert out == ""
  assert not (tmp_path / "divide").exists()


def test_help_is_quick_to_read_and_needs_no_jax(tmp_path):
  # A broken jax on the path: whoever imports it fails.
  (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
  code, out, error = processes.run(
    "train", "--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{processes.ROOT}"
  )
  assert "jax was imported" not in out + error
  assert code in (0, 1)  # absl exits with 1 after --help
  assert "\n  --config: " in out
  for needed in ("--config", "--workdir", "configs/reverse.py", "resume"):
    assert needed in out


def test_the_default_workdir_is_named_after_config_and_argument(tmp_path):
  processes.write_config(tmp_path)
  code, out, error = processes.run(
    "train", "--config=tiny.py:dot", "--config.train.steps=1", cwd=tmp_path
  )
  assert code == 0, error
  assert (tmp_path / "runs" / "tiny-dot" / "config.json").exists()
  assert "runs/tiny-dot" in out
