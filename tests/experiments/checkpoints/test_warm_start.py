"""Training starts from the parameters of another run."""

import shutil

import jax
import numpy as np
import pytest

from experiments import inference
from experiments.checkpoints import warm_start
from experiments.checkpoints.parameter_file import named
from experiments.config import MeshConfig, TrainConfig, parse
from experiments.errors import UserError
from experiments.experiment import make_experiment
from experiments.run_directory import claim
from experiments.training import loop
from tests.experiments import version_1
from tests.experiments.conftest import make_tiny_translation
from tests.experiments.states import (
  assert_same_bits,
  final_state,
  stop_at,
  tiny_run,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  return version_1.extract(tmp_path_factory.mktemp("runs"))


def experiment_from(run, **model):
  config = tiny_run(init_from=str(run))
  config.model.update(model)
  return make_experiment(parse(config.to_dict()), None)


def assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
  ("init_from", "expected"),
  [
    ("", None),
    ("runs/a", ("runs/a", None)),
    ("runs/a:best", ("runs/a", "best")),
    ("runs/a:last:10", ("runs/a", "last:10")),
    ("runs/a:b:120", ("runs/a:b", "120")),
    ("gs://bucket/a", ("gs://bucket/a", None)),
    ("gs://bucket/a:best", ("gs://bucket/a", "best")),
  ],
)
def test_a_run_and_its_checkpoint_are_told_apart(init_from, expected):
  found = TrainConfig(init_from=init_from).init_run
  assert found == expected


def test_all_parameters_of_an_equal_model_are_taken(runs, caplog):
  with caplog.at_level("INFO", "absl"):
    state = warm_start.warm_started(experiment_from(f"{runs / 'reverse'}:9"))
  expected = inference.restore(runs / "reverse", "9").params
  assert_same(state.params, expected)
  count = len(jax.tree.leaves(expected))
  assert f"{count} of {count} parameter arrays are those of" in caplog.text
  assert "(step 9)" in caplog.text
  assert int(state.step) == 0
  assert not any(leaf.any() for leaf in jax.tree.leaves(state.opt_state))


def test_parameters_that_do_not_fit_keep_their_initial_values(runs, caplog):
  experiment = experiment_from(
    runs / "reverse", attention="general", readout="linear"
  )
  with caplog.at_level("INFO", "absl"):
    state = warm_start.warm_started(experiment)
  theirs = named(inference.restore(runs / "reverse").params)
  initial = named(experiment.initial_state().params)
  found = named(state.params)
  assert found.keys() == initial.keys()
  taken = 0
  for name, leaf in found.items():
    fits = name in theirs and theirs[name].shape == leaf.shape
    taken += fits
    np.testing.assert_array_equal(leaf, (theirs if fits else initial)[name])
  assert 0 < taken < len(found)
  assert f"{taken} of {len(found)} parameter arrays" in caplog.text
  assert "because it has none of this name: look/" in caplog.text
  assert "because they have another shape there: output/kernel" in caplog.text


def text_experiment(corpus, workdir, run, **data):
  config = make_tiny_translation(corpus)
  config.data.update(data)
  config.train.init_from = str(run)
  return make_experiment(
    parse(config.to_dict()), workdir, mesh=MeshConfig.one(), train=True
  )


def test_text_with_equal_settings_keeps_the_tokenizers(runs, corpus, tmp_path):
  source, workdir = runs / "translation", tmp_path / "run"
  experiment = text_experiment(corpus, workdir, source)
  for side in ("source", "target"):
    name = f"tokenizer/{side}.model"
    assert (workdir / name).read_bytes() == (source / name).read_bytes()
  assert warm_start._same_tokens(
    inference.restore(source).experiment, experiment
  )


@pytest.mark.exhaustive
def test_embeddings_of_other_tokenizers_are_not_taken(
  runs, corpus, tmp_path, caplog
):
  other = tmp_path / "corpus"
  other.mkdir()
  for path in corpus.iterdir():
    text = path.read_text("utf-8").replace("Hund", "Wolf")
    (other / path.name).write_text(text, "utf-8")
  experiment = text_experiment(
    other, tmp_path / "run", runs / "translation", source="de", target="en"
  )
  with caplog.at_level("INFO", "absl"):
    state = warm_start.warm_started(experiment)
  theirs = inference.restore(runs / "translation").params
  assert_same(state.params["encoder_0"], theirs["encoder_0"])
  initial = experiment.initial_state().params
  assert_same(state.params["embedding"], initial["embedding"])
  assert "embedding/embedding" in caplog.text


@pytest.mark.parametrize(
  ("init_from", "message"),
  [
    ("nowhere", "config.train.init_from=nowhere: not a run"),
    (
      "{runs}/reverse:bset",
      "reverse:bset: no run directory .* or a step; did you mean 'best'\\?$",
    ),
    (
      "{runs}/reverse:7",
      "reverse:7: checkpoint=7: not in .*; saved steps: 9, 12",
    ),
    ("{runs}/translation", "no parameter fits this model"),
  ],
)
def test_an_error_leaves_the_directory_unclaimed(
  init_from, message, runs, tmp_path
):
  config = tiny_run(init_from=init_from.format(runs=runs))
  with pytest.raises(UserError, match=message):
    loop.train_and_evaluate(config, tmp_path / "run")
  assert claim(tmp_path / "run", tiny_run().to_dict())


@pytest.mark.exhaustive
def test_a_resumed_run_does_not_read_the_parameters_again(
  runs, tmp_path, monkeypatch
):
  source = shutil.copytree(runs / "reverse", tmp_path / "source")
  config = tiny_run(init_from=str(source))
  assert loop.train_and_evaluate(config, tmp_path / "whole")
  stop_at(monkeypatch, 7)
  assert not loop.train_and_evaluate(config, tmp_path / "stopped")
  shutil.rmtree(source)
  assert loop.train_and_evaluate(config, tmp_path / "stopped")
  whole = final_state(tmp_path / "whole")
  assert_same_bits(whole, final_state(tmp_path / "stopped"))
  cold = tiny_run()
  assert loop.train_and_evaluate(cold, tmp_path / "cold")
  with pytest.raises(AssertionError):
    assert_same_bits(whole, final_state(tmp_path / "cold"))
