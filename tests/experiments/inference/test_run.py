"""A run as a Python object: translations, scores and attention weights."""

import json
import shutil

import jax
import numpy as np
import pytest

import experiments
from experiments import inference
from experiments.config import Config
from experiments.decoding.batching import Search
from experiments.errors import UserError
from tests.experiments import version_1
from tests.experiments.toys import log_softmax

SOURCES = ["a dog runs in the snow.", "", "two men sleeps today!"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return version_1.extract(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def run(folder):
  return experiments.load(folder / "translation")


def test_config_params_and_checkpoint_are_those_of_the_run(run, folder):
  assert isinstance(run.config, Config)
  assert run.config.data.name == "text"
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
  assert run.checkpoint == "mean of 2 steps, 6 to 8"
  assert run.name == str(folder / "translation")
  assert experiments.load(folder / "translation", "8").checkpoint == "step 8"


def test_loading_a_run_logs_no_warnings_of_libraries(folder, caplog):
  experiments.load(folder / "translation")
  assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_damaged_checkpoint_is_named_with_the_steps_of_others(
  folder, tmp_path
):
  shutil.copytree(folder / "translation", tmp_path / "run")
  shutil.rmtree(tmp_path / "run/checkpoints/8/state/ocdbt.process_0")
  with pytest.raises(UserError, match=r"/8 is damaged \(") as caught:
    experiments.load(tmp_path / "run", "8")
  assert str(caught.value).endswith("). Other steps: checkpoint=6.")
  assert "<bound method" not in str(caught.value)


def test_a_config_that_does_not_fit_the_checkpoint_is_named(folder, tmp_path):
  shutil.copytree(folder / "translation", tmp_path / "run")
  path = tmp_path / "run" / "config.json"
  config = json.loads(path.read_text())
  config["model"]["feed_forward_size"] *= 2
  path.write_text(json.dumps(config))
  message = (
    r"/8 does not fit the model of config.json \(Requested shape: \(.*\)\);"
  )
  with pytest.raises(UserError, match=message):
    experiments.load(tmp_path / "run", "8")


def test_a_run_is_loaded_on_devices_without_its_kernels(folder, tmp_path):
  shutil.copytree(folder / "translation", tmp_path / "run")
  path = tmp_path / "run" / "config.json"
  config = json.loads(path.read_text())
  config["model"]["attention_implementation"] = "pallas"
  path.write_text(json.dumps(config))
  loaded = experiments.load(tmp_path / "run")
  assert loaded.config.model.attention_implementation == "auto"


def test_translations_are_in_order_and_blank_lines_stay_blank(run):
  translations = run.translate(SOURCES, beam_size=1)
  assert len(translations) == 3
  assert translations[1] == ""
  assert run.translate(SOURCES[2:], beam_size=1) == translations[2:]


def test_a_score_is_the_log_probability_of_the_target(run):
  targets = ["ein Hund läuft", "das Kind singt ein Lied heute!"]
  sources = ["a dog runs", "the girl sings today!"]
  found = run.score(sources, targets)
  model = run._restored.experiment.model
  source, target = run._encoded(sources, targets)
  logits = jax.jit(model.apply)({"params": run.params}, source, target)
  chosen = np.take_along_axis(log_softmax(logits), target[..., None], -1)[
    ..., 0
  ]
  np.testing.assert_allclose(found, (chosen * (target != 0)).sum(1), rtol=1e-4)


def test_attention_is_that_of_the_translation_or_of_a_target(run):
  pair = run.attention(SOURCES[0])
  (translation,) = run.translate(SOURCES[:1], beam_size=1)
  assert pair.translation == translation
  assert pair.text == SOURCES[0]
  assert len(pair.weights) == 3
  assert pair.weights["cross-attention"].shape[2:] == (
    len(pair.target),
    len(pair.source),
  )
  for weights in pair.weights.values():
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
  given = run.attention(SOURCES[0], "ein Hund läuft")
  assert given.target == ["_ein", "_Hund", "_läuft", "</s>"]


def test_errors_of_lines_name_them(run):
  long = "dog " * 40
  with pytest.raises(UserError, match="line 2: 40 tokens, the model reads 15"):
    run.translate(["a dog", long])
  with pytest.raises(UserError, match="target line 1: 40 tokens, the model"):
    run.score(["a dog"], [long])
  with pytest.raises(
    UserError, match="no such set; there are: test, validation"
  ):
    run.example_lines(3, split="tst")
  with pytest.raises(UserError, match="1 source, but 2 targets"):
    run.score(["a dog"], ["ein Hund"] * 2)
  with pytest.raises(UserError, match="not blank"):
    run.attention(" ")


@pytest.mark.parametrize(
  ("method", "arguments", "options", "message"),
  [
    ("translate", ["a dog"], {}, r"lines must be a list .*; write \[line\]"),
    ("score", ["a", ["b"]], {}, "sources must be a list of strings, got a str"),
    ("score", [["a"], "b"], {}, "targets must be a list of strings, got a str"),
    ("translate", [["a", 3]], {}, "list of strings, got a value of type int"),
    ("attention", [["a dog"]], {}, "source must be a string, got a list"),
    ("attention", ["a", ["b"]], {}, "target must be a string, got a list"),
    ("translate", [["dog " * 40]], {}, "model reads 15; split it$"),
    *[
      ("translate", [["a dog"]], {name: value}, f"^{name}={value}: {reason}")
      for name, value, reason in (
        ("beam_size", 0, "must be at least 1"),
        ("max_length", 0, "must be at least 1"),
        ("length_penalty", -1.0, "must be at least 0"),
        ("beam_size", 10**9, "must be at most 4096"),
        ("length_penalty", 11.0, "must be at most 10"),
        ("max_length", 99, "the model was built for at most 16"),
      )
    ],
  ],
)
def test_errors_of_arguments_name_them(
  method, arguments, options, message, run
):
  with pytest.raises(UserError, match=message):
    getattr(run, method)(*arguments, **options)


def test_errors_of_loading_name_its_arguments(folder):
  with pytest.raises(UserError, match=r"^workdir=nope: not a run directory"):
    experiments.load("nope")
  message = "^checkpoint=7: not in .*/checkpoints; saved steps: 6, 8$"
  with pytest.raises(UserError, match=message):
    experiments.load(folder / "translation", "7")
  with pytest.raises(UserError, match=r"^checkpoint=: must be last, best, "):
    experiments.load(folder / "translation", "")


def test_a_synthetic_task_reads_symbols(folder):
  run = experiments.load(folder / "reverse")
  (prediction,) = run.translate(["1 2 3"])
  assert set(prediction.split()) <= set(map(str, range(6)))
  assert run.attention("1 2 3").source == ["1", "2", "3", "</s>"]
  assert run.attention("1 2 3", "3 2 1").gold is not None
  for word in ("6", "-1", "x", "²"):
    with pytest.raises(UserError, match=f"'{word}' is no symbol of reverse"):
      run.translate([f"1 {word}"])
  with pytest.raises(UserError, match="line 3: '9' is no symbol"):
    run.translate(["1", "", "9"])
  with pytest.raises(UserError, match="line 2: '9' is no symbol"):
    run.score(["1", "2"], ["1", "9"])


def test_errors_of_the_lines_of_a_file_name_it(folder):
  restored = inference.restore(folder / "reverse")
  translate = inference.make_translator(
    restored, Search(), refuse_long=True, source="a.txt"
  )
  with pytest.raises(UserError, match=r"^a\.txt, line 7: 'x' is no symbol of"):
    translate(["1", "x"], first=6)
  with pytest.raises(UserError, match=r"^a\.txt, line 2: \d+ tokens"):
    translate(["1", "1 " * 99])


def test_sources_to_show_are_of_the_validation_set(run):
  lines = run.example_lines(3)
  assert len(set(lines)) == 3
  examples = run._restored.experiment.data.evaluation_set("validation")
  assert set(lines) <= set(examples.text.source)
