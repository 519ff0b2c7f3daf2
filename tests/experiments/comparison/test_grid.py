"""The trials of a comparison, and which of them are complete."""

import json

import pytest

from configs import base
from experiments.comparison import grid
from experiments.config import parse
from experiments.errors import UserError
from tests.experiments.comparison.trials import make_trials, write_results


def test_every_combination_and_seed_is_a_trial_with_its_own_directory():
  trials = make_trials(
    {"model.attention": ["none", "dot"], "model.input_feeding": ["true"]},
    num_seeds=3,
  )
  assert [trial.seed for trial in trials] == [0, 1, 2] * 2
  assert len({trial.workdir for trial in trials}) == 6
  assert {trial.group for trial in trials} == {
    "none, input_feeding=true",
    "dot, input_feeding=true",
  }
  last = trials[-1]
  assert last.name == "dot, input_feeding=true, seed 2"
  assert str(last.workdir) == "c/dot_input_feeding=true/seed-2"
  assert last.raw["model"]["attention"] == "dot"
  assert last.raw["model"]["input_feeding"] is True
  assert last.raw["seed"] == 2
  assert "--config.model.input_feeding=true" in last.command
  assert f"--workdir={last.workdir}" in last.command


def test_scores_of_a_transformer_can_be_swept():
  names = ["local_p", "forgetting"]
  config = base.get_config("transformer")
  trials = make_trials({"model.score": names}, config=config)
  assert [trial.group for trial in trials] == names
  assert "--config.model.score=forgetting" in trials[1].command
  with pytest.raises(UserError, match="no such field; did you mean 'score'"):
    make_trials({"model.attention": names}, config=config)


@pytest.mark.parametrize(
  ("sweeps", "message"),
  [
    ({"model.attention": ["none", "dto"]}, "config.model.attention"),
    ({"model.atention": ["none"]}, "config.model.atention: no such field"),
    ({"train.steps": ["many"]}, "config.train.steps: got 'many'"),
    ({"model.input_feeding": ["1"]}, "config.model.input_feeding: got 1"),
    ({"model.attention": ["dot", "dot"]}, "dot is given twice"),
    ({"optimizer.learning_rate": ["1e-3", "0.001"]}, "learning_rate=0.001 is"),
    ({"model.attention.size": ["1"]}, "config.attention has no fields"),
    (
      {"train.init_from": ["d/gz", "d_gz"]},
      "--sweep: init_from=d/gz and init_from=d_gz have the same directory, "
      "c/init_from=d_gz; compare them in two commands",
    ),
    ({"seed": ["1", "2"]}, "set the number of seeds with --seeds"),
  ],
)
def test_invalid_sweeps_are_errors_before_training(sweeps, message):
  with pytest.raises(UserError, match=message):
    make_trials(sweeps)


def test_sweep_of_an_optional_field_accepts_none():
  first, second = make_trials({"optimizer.clip_norm": ["None", "1"]})
  assert first.raw["optimizer"]["clip_norm"] is None
  assert "--config.optimizer.clip_norm=None" in first.command
  assert second.group == "clip_norm=1"


@pytest.mark.parametrize("text", ["model.order", "=a,b", "seed=", "seed=1,"])
def test_sweep_without_field_or_values_is_rejected(text):
  with pytest.raises(UserError, match="--sweep="):
    grid.parse_sweep(text)


def test_parse_sweep_drops_the_prefix_of_the_config():
  expected = ("model.input_feeding", ["true", "false"])
  assert grid.parse_sweep("config.model.input_feeding=true, false") == expected


def test_scores_flag_sweeps_the_score_field_of_the_model():
  assert grid.score_field(base.get_config("dot")) == "model.attention"
  assert grid.score_field(base.get_config("transformer")) == "model.score"


def test_group_names_include_sections_of_ambiguous_fields():
  fields = {"data.source_tokenizer.kind": "words", "data.name": "text"}
  assert grid.group_name(fields) == "kind=words, name=text"
  fields["data.target_tokenizer.kind"] = "bpe"
  assert grid.group_name(fields) == (
    "data.source_tokenizer.kind=words, name=text,"
    " data.target_tokenizer.kind=bpe"
  )


def test_other_runs_in_the_folder_are_listed(tmp_path):
  sweep = {"model.attention": ["dot", "general"]}
  trials = make_trials(sweep, tmp_path, num_seeds=2)
  for trial in trials:
    write_results(trial, 0.5)
  others = grid.other_runs(trials[:1], tmp_path)
  assert others == ["dot/seed-1", "general/seed-0", "general/seed-1"]
  assert grid.further_seeds(trials[:1], others) == ["dot/seed-1"]
  assert not grid.other_runs(trials, tmp_path)


def test_a_trial_evaluated_with_another_search_is_not_complete(tmp_path):
  (trial,) = make_trials({"model.attention": ["dot"]}, tmp_path)
  assert not trial.is_complete()
  write_results(trial, 0.5)
  assert trial.is_complete()
  write_results(trial, 0.5, beam_size=5)
  assert not trial.is_complete()


def test_a_trial_evaluated_with_other_settings_is_not_complete(tmp_path):
  (trial,) = make_trials({"model.attention": ["dot"]}, tmp_path)
  write_results(trial, 0.5)
  path = trial.workdir / "eval" / "test.json"
  stored = json.loads(path.read_text())
  evaluation = parse(trial.raw).evaluation.model_dump(mode="json")
  for lowercase in (evaluation["lowercase"], not evaluation["lowercase"]):
    config = evaluation | {"lowercase": lowercase}
    path.write_text(json.dumps(stored | {"config": config}))
    assert trial.is_complete() == (config == evaluation)


@pytest.mark.parametrize(
  "path", ["eval/test.json", "figures/alignments_validation.npz"]
)
@pytest.mark.parametrize("content", [b"", b"{"])
def test_a_trial_with_a_damaged_result_is_not_complete(path, content, tmp_path):
  (trial,) = make_trials({"model.attention": ["dot"]}, tmp_path)
  write_results(trial, 0.5)
  (trial.workdir / path).write_bytes(content)
  assert not trial.is_complete()
