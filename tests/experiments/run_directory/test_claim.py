"""A run directory belongs to one config, of which some fields may change."""

import errno
import json
import pathlib
import tempfile

import pytest

from configs import base
from experiments import run_directory
from experiments.errors import UserError
from experiments.run_directory import claim, read_config


def set_fields(config, fields):
  for field, value in fields.items():
    *sections, name = field.split(".")
    section = config
    for each in sections:
      section = section[each]
    section[name] = value


def config_with(**fields):
  config = base.get_config()
  set_fields(config, {k.replace("__", "."): v for k, v in fields.items()})
  return config.to_dict()


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("evaluation.beam_size", 5),
    ("evaluation.checkpoint", "best"),
    ("train.keep_last", 9),
    ("train.keep_best", 3),
    ("train.log_every", 7),
    ("train.eval_every", 250),
    ("train.patience", 3),
    ("mesh.data", 1),
    ("model.scan_layers", True),
    ("model.remat", True),
    ("model.attention_implementation", "blockwise"),
  ],
)
def test_a_field_without_effect_on_parameters_may_change(
  field, value, tmp_path, caplog
):
  changed = base.get_config("transformer")
  assert claim(tmp_path, changed.to_dict())
  set_fields(changed, {field: value})
  with caplog.at_level("INFO", "absl"):
    assert not claim(tmp_path, changed.to_dict())
  assert f"config.{field}={value}" in caplog.text
  assert read_config(tmp_path).model_dump() == changed.to_dict()


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
  def fail(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")

  message = f"^--workdir={tmp_path}: cannot be written \\(Read-only file"
  for method in ("open", "unlink"):
    monkeypatch.setattr(pathlib.Path, method, fail)
  with pytest.raises(UserError, match=message):
    claim(tmp_path, config_with())
  with pytest.raises(OSError, match=f"'{tmp_path}/config.json'$"):
    run_directory.write_text(tmp_path / "config.json", "")
  monkeypatch.setattr(tempfile, "TemporaryFile", fail)
  with pytest.raises(UserError, match=message):
    run_directory.check_results(tmp_path)


@pytest.mark.parametrize(
  "field", ["seed", "train.batch_size", "train.dtype", "model.hidden_size"]
)
def test_a_field_with_an_effect_on_parameters_must_not_change(field, tmp_path):
  config = base.get_config()
  claim(tmp_path, config.to_dict())
  value = {"seed": 7, "train.batch_size": 8, "train.dtype": "bfloat16"}
  set_fields(config, {field: value.get(field, 64)})
  with pytest.raises(UserError, match=f"config.{field}: "):
    claim(tmp_path, config.to_dict())


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_steps_may_grow_if_the_schedule_does_not_depend_on_them(
  schedule, tmp_path
):
  config = base.get_config()
  config.optimizer.schedule = schedule
  claim(tmp_path, config.to_dict())
  config.train.steps = 3000
  assert not claim(tmp_path, config.to_dict())
  assert read_config(tmp_path).train.steps == 3000
  config.train.steps = 1000
  with pytest.raises(UserError, match=r"train\.steps: stored 3000"):
    claim(tmp_path, config.to_dict())


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_steps_must_not_change_if_the_schedule_depends_on_them(
  schedule, tmp_path
):
  config = base.get_config()
  config.optimizer.schedule = schedule
  claim(tmp_path, config.to_dict())
  config.train.steps = 3000
  message = (
    rf"such as --workdir={tmp_path}-2\n  config\.train\.steps: stored 2500,"
    r" given 3000; it can only be raised, with .* 'constant' or 'inverse"
  )
  with pytest.raises(UserError, match=message):
    claim(tmp_path, config.to_dict())


def test_evaluation_checkpoint_that_was_not_saved_can_be_changed(tmp_path):
  stuck = config_with(evaluation__checkpoint="777")
  (tmp_path / "config.json").write_text(json.dumps(stuck))
  assert read_config(tmp_path).evaluation.checkpoint == "777"
  assert not claim(tmp_path, config_with())
  assert read_config(tmp_path).evaluation.checkpoint == "last"


@pytest.mark.parametrize(
  ("field", "value"), [("train.steps", "x"), ("version", 99)]
)
def test_an_invalid_field_of_a_stored_config_is_named_with_its_file(
  field, value, tmp_path
):
  config = config_with()
  claim(tmp_path, config)
  path = tmp_path / "config.json"
  stored = json.loads(path.read_text())
  set_fields(stored, {field: value})
  path.write_text(json.dumps(stored))
  message = f"^{path}: config.{field}: got {value!r}; "
  for call in (lambda: read_config(tmp_path), lambda: claim(tmp_path, config)):
    with pytest.raises(UserError, match=message):
      call()


def test_release_deletes_the_files_of_a_new_run(tmp_path):
  workdir = tmp_path / "run"
  assert claim(workdir, config_with())
  run_directory.release(workdir)
  assert not workdir.exists()
  assert claim(workdir, config_with(seed=1))
