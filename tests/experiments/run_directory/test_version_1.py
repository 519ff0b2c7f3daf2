"""Run directories that schema version 1 wrote still train, evaluate, translate.

The archive was written by commit 02aa2f0: a reverse run (adamw, constant
schedule, 12 steps, checkpoints 9 and 12) and a translation run (8 steps,
checkpoints 6 and 8), both as small as tests/experiments/conftest.py makes
them, without figures and TensorBoard events.
"""

import json
import shutil

import pytest

from experiments import inference
from experiments.errors import UserError
from experiments.evaluation.search import configured_search
from experiments.run_directory import read_config
from experiments.training import loop
from tests.experiments import version_1
from tests.experiments.conftest import make_tiny
from tests.experiments.states import stop_at


@pytest.fixture
def runs(tmp_path):
  return version_1.extract(tmp_path)


def reverse_config(**train):
  config = make_tiny()
  config.optimizer.update(name="adamw", schedule="constant", weight_decay=0.01)
  config.train.update(train)
  config.mesh.data = 1
  return config


def training_lines(workdir):
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return {line["step"]: line for line in lines if line["split"] == "train"}


def test_training_resumes_with_the_behaviour_of_version_1(runs, monkeypatch):
  """Steps 10 to 12 are repeated; version 1 decayed all parameters."""
  workdir = runs / "reverse"
  before = training_lines(workdir)
  shutil.rmtree(workdir / "checkpoints" / "12")
  stop_at(monkeypatch, 13)  # without the final evaluation
  assert not loop.train_and_evaluate(reverse_config(steps=14), workdir)
  after = training_lines(workdir)
  assert list(after) == [2, 4, 6, 8, 10, 12]
  for step in (10, 12):
    for name in ("loss", "gradient_norm", "parameter_norm"):
      assert after[step][name] == pytest.approx(before[step][name], rel=1e-5)
  config = read_config(workdir)
  assert config.optimizer.weight_decay_of == "all"
  assert config.model.normalizer == "softmax"
  assert config.train.steps == 14


def test_evaluation_gives_the_result_of_version_1(runs):
  workdir = runs / "translation"
  stored = json.loads((workdir / "eval" / "test.json").read_text())["metrics"]
  restored = inference.restore(workdir)
  _, examples = inference.evaluation_set(restored.experiment, "test")
  search = configured_search(restored.experiment)
  evaluation = inference.evaluate(restored, examples, search)
  assert evaluation.metrics["loss"] == pytest.approx(stored["loss"], rel=1e-5)
  assert evaluation.metrics["bleu"] == pytest.approx(stored["bleu"])


def test_a_newer_version_is_rejected(runs):
  path = runs / "reverse" / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
  with pytest.raises(UserError, match=r"config\.version: got 99"):
    read_config(runs / "reverse")
