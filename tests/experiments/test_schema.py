"""Configs: every default builds, and every mistake is named."""

import copy

import pytest

from configs import base
from experiments import schema
from experiments.errors import UserError


def raw(arg=""):
  return base.get_config(arg).to_dict()


def with_value(path, value, arg=""):
  config = raw(arg)
  section = config
  *parents, name = path.split(".")
  for parent in parents:
    section = section[parent]
  section[name] = value
  return config


@pytest.mark.parametrize("arg", base.ARGUMENTS)
def test_every_argument_gives_a_valid_config(arg):
  parsed = schema.parse(raw(arg))
  assert parsed.model_dump() == raw(arg)


@pytest.mark.parametrize(
  ("path", "value", "message"),
  [
    ("seed", -1, "config.seed: got -1; "),
    ("seed", 2**32, "config.seed: got 4294967296; "),
    ("seed", True, "config.seed: got True; "),
    ("train.steps", 0, "config.train.steps: got 0; "),
    ("train.steps", "many", "config.train.steps: got 'many'; "),
    ("train.steps", 1.5, "config.train.steps: got 1.5; "),
    ("train.step", 5, r"config.train.step: no such field.* 'steps'"),
    ("trian", {}, r"config.trian: no such field.* 'train'"),
    ("train.dtype", "float16", "'float32' or 'bfloat16'"),
    ("train.accumulation", 3, "accumulation 3 must divide batch_size"),
    ("model.hiden_size", 4, r"no such field.* 'hidden_size'"),
    ("model.hidden_size", 5, "hidden_size must be even"),
    ("model.attention", "cosin", "'cosine'"),
    ("model.cell", "rnn", "config.model.cell: got 'rnn'; "),
    ("model.name", "rnn", "config.model.name: got 'rnn'; known"),
    ("optimizer.learning_rate", 0.0, "greater than 0"),
    ("optimizer.learning_rate", float("inf"), "finite"),
    ("optimizer.weight_decay", 0.1, "use name 'adamw'"),
    ("optimizer.schedule", "step", "config.optimizer.schedule"),
    ("data.name", "sort", "config.data.name: got 'sort'; "),
    ("data.min_length", 30, "min_length must not be above max_length"),
    ("data.splits.test.min_length", 99, "config.data.splits.test"),
    ("data.splits.test.size", 9, "config.data.splits.test.size: no such field"),
    ("data.splits", {}, "validation"),
    ("mesh.data", 0, "-1"),
  ],
)
def test_a_mistake_is_named_with_its_field(path, value, message):
  with pytest.raises(UserError, match=message) as caught:
    schema.parse(with_value(path, value))
  assert "pydantic" not in str(caught.value)
  assert len(str(caught.value).splitlines()) == 1


def test_a_missing_field_is_named():
  config = raw()
  del config["train"]["steps"]
  with pytest.raises(UserError, match=r"config\.train\.steps: missing"):
    schema.parse(config)


def test_all_mistakes_are_named_at_once():
  config = with_value("seed", -1)
  config["train"]["steps"] = 0
  with pytest.raises(UserError) as caught:
    schema.parse(config)
  assert len(str(caught.value).splitlines()) == 2


def test_lookup_needs_as_many_symbols_as_pairs():
  config = with_value("data.name", "lookup")
  config["data"]["symbols"] = 10
  with pytest.raises(UserError, match="distinct keys"):
    schema.parse(config)


def test_scores_that_need_equal_sizes_refuse_a_whole_state_as_query():
  config = with_value("model.query", "state", arg="dot")
  config["model"]["cell"] = "lstm"
  with pytest.raises(UserError, match="equal size"):
    schema.parse(config)


def test_parsing_leaves_its_argument_alone():
  config = raw()
  before = copy.deepcopy(config)
  schema.parse(config)
  assert config == before
