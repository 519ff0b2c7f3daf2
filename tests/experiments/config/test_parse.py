"""Configs: the defaults are valid, and an error names its field."""

import copy
import typing

import pytest

from attention import modules
from attention.implementations import BY_NAME
from configs import base, multi30k, translation
from experiments.config import Config, parse
from experiments.config.parse import parse_stored
from experiments.config.sections import (
  ImplementationName,
  RecurrentScoreName,
  Section,
)
from experiments.errors import UserError


def raw(arg=""):
  return base.get_config(arg).to_dict()


def with_value(path, value, arg="", config=None):
  config = config or raw(arg)
  section = config
  *parents, name = path.split(".")
  for parent in parents:
    section = section[parent]
  section[name] = value
  return config


@pytest.mark.parametrize("arg", base.ARGUMENTS)
def test_every_argument_gives_a_valid_config(arg):
  parsed = parse(raw(arg))
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
    (
      "train.batch_size",
      10**10,
      r"batch_size: got 1\d+; .* less than 2147483648",
    ),
    ("data.symbols", 10**11, "config.data.symbols: got 100000000000; "),
    ("data.symbols", 1, "config.data.symbols: got 1; "),
    ("model.hiden_size", 4, r"no such field.* 'hidden_size'"),
    ("model.hidden_size", 5, "hidden_size must be even"),
    ("model.attention", "cosin", "'cosine'"),
    ("model.attention", "forgetting", r"'forgetting'; input .* 'local_p'"),
    ("model.score", "dot", "config.model.score: no such field.* 'attention'"),
    ("model.normalizer", "softmin", "config.model.normalizer: got 'softmin'; "),
    ("model.cell", "rnn", "config.model.cell: got 'rnn'; "),
    ("model.name", "rnn", "config.model.name: got 'rnn'; known"),
    ("model.name", "transformer", "fields are those of another model; the arg"),
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
    ("train.batch_unit", "tokens", "'tokens' is for text; reverse needs"),
    ("train.best_metric", "chrf", "'chrf' is for text; use 'sequence_acc"),
    ("train.ema_decay", 1.0, "config.train.ema_decay: got 1.0; "),
    ("train.steps", 2**31, "config.train.steps: got 2147483648; "),
    ("train.patience", -1, "config.train.patience: got -1; "),
    ("evaluation.checkpoint", "last:3", "raise config.train.keep_last from 2"),
    ("evaluation.checkpoint", "best:2", "raise config.train.keep_best from 1"),
    ("evaluation.checkpoint", "last:0", "config.evaluation.checkpoint: got"),
    ("evaluation.checkpoint", "first", "config.evaluation.checkpoint: got"),
    ("evaluation.beam_size", 0, "config.evaluation.beam_size: got 0; "),
    ("evaluation.beam_size", 10**9, "less than or equal to 4096"),
    ("evaluation.length_penalty", 1e30, "less than or equal to 10"),
    ("evaluation.bleu_tokenizer", "14a", "'13a', 'none'"),
    ("model.encoder_size", 5, "encoder_size must be even"),
    (
      "model.attention_implementation",
      "palas",
      r"attention_implementation: got 'palas'; .* 'auto', .* or 'pallas'",
    ),
    ("model.attention_implementation", "pallas", "no effect.* order 'luong'"),
  ],
)
def test_an_invalid_field_is_named(path, value, message):
  with pytest.raises(UserError, match=message) as caught:
    parse(with_value(path, value))
  assert "pydantic" not in str(caught.value)
  assert len(str(caught.value).splitlines()) == 1


def text():
  return translation.get_config().to_dict()


@pytest.mark.parametrize("arg", base.ARGUMENTS)
@pytest.mark.parametrize("module", [translation, multi30k])
def test_every_argument_gives_a_valid_text_config(module, arg):
  config = module.get_config(arg).to_dict()
  assert parse(config).model_dump() == config


@pytest.mark.parametrize(
  ("path", "value", "message"),
  [
    ("format", "xml", "config.data.format: got 'xml'; "),
    ("train", "", "config.data.train: got ''; "),
    ("target", "en", "source and target are both 'en'; name two"),
    ("source", "../en", "config.data.source: got '../en'; "),
    ("splits", {"test": "test"}, "splits must have a 'validation'"),
    ("splits", {"validation": "a", "a/b": "c"}, "config.data.splits.a/b"),
    ("source_tokenizer.kind", "bytes", "'unigram', 'bpe', 'words'"),
    ("source_tokenizer.kind", "bpe", "joint_vocabulary needs source_tok"),
    ("length_multiple", 7, "128 is no multiple of 7"),
    ("source_tokenizer.size", 9, "source_tokenizer.size: no such field"),
    ("max_lenght", 9, "config.data.max_lenght: no such field.* 'max_length'"),
    ("symbols", 9, "config.data.symbols: no such field"),
  ],
)
def test_an_invalid_field_of_text_is_named(path, value, message):
  config = with_value(f"data.{path}", value, config=text())
  with pytest.raises(UserError, match=message) as caught:
    parse(config)
  assert len(str(caught.value).splitlines()) == 1


def test_patience_needs_a_best_checkpoint():
  config = raw()
  config["train"].update(patience=2, keep_best=0)
  with pytest.raises(UserError, match=r"keep_best must be at least 1"):
    parse(config)


def test_a_missing_field_is_named():
  config = raw()
  del config["train"]["steps"]
  with pytest.raises(UserError, match=r"config\.train\.steps: missing"):
    parse(config)


def test_all_invalid_fields_are_named_at_once():
  config = with_value("seed", -1)
  config["train"]["steps"] = 0
  with pytest.raises(UserError) as caught:
    parse(config)
  assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
  ("name", "field"),
  [
    ("adafactor", "b1"),
    ("adafactor", "b2"),
    ("adafactor", "eps"),
    ("sgd", "b2"),
  ],
)
def test_a_field_that_the_optimizer_ignores_is_rejected(name, field):
  config = with_value("optimizer.name", name)
  config["optimizer"][field] = 0.5
  with pytest.raises(UserError, match=rf"{field} 0\.5 has no effect under"):
    parse(config)


@pytest.mark.parametrize(
  ("checkpoint", "train"),
  [
    ("777", {}),
    ("3000", {}),
    ("0", {}),
    ("1000", {"keep_best": 0}),  # Only 2000 and 2500 are kept.
  ],
)
def test_a_checkpoint_that_cannot_exist_is_rejected(checkpoint, train):
  config = with_value("evaluation.checkpoint", checkpoint)
  config["train"].update(train)
  with pytest.raises(
    UserError, match=rf"checkpoint: got '{checkpoint}'.* 2000 or 2500"
  ) as caught:
    parse(config)
  assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("checkpoint", ["2500", "2000", "500"])
def test_a_checkpoint_that_may_exist_is_accepted(checkpoint):
  parse(with_value("evaluation.checkpoint", checkpoint))


def test_every_field_has_a_description():
  sections = [Config, *_sections(Section)]
  missing = [
    f"{section.__name__}.{name}"
    for section in sections
    for name, field in section.model_fields.items()
    if name != "name" and not field.description
    if not _is_section(field.annotation)
  ]
  assert missing == []


def _sections(kind):
  for each in kind.__subclasses__():
    yield each
    yield from _sections(each)


def _is_section(annotation):
  kinds = typing.get_args(annotation) or (annotation,)
  return all(isinstance(kind, type(Section)) for kind in kinds)


def test_the_defaults_of_the_types_are_those_of_the_base_config():
  config = raw()
  sections = ("data", "model", "optimizer", "train", "evaluation", "mesh")
  stored = {name: {} for name in sections}
  stored["data"]["name"] = config["data"]["name"]
  stored["model"]["name"] = config["model"]["name"]
  filled = parse_stored(stored | {"version": config["version"]})
  assert filled.model_dump() == config


def test_lookup_needs_as_many_symbols_as_pairs():
  config = with_value("data.name", "lookup")
  config["data"]["symbols"] = 10
  with pytest.raises(UserError, match="distinct keys"):
    parse(config)


def test_scores_that_need_equal_sizes_reject_a_query_of_all_states():
  config = with_value("model.query", "state", arg="dot")
  config["model"]["cell"] = "lstm"
  with pytest.raises(UserError, match="equal size"):
    parse(config)


@pytest.mark.parametrize("attention", ["local_m", "local_p"])
def test_the_score_in_a_window_may_need_equal_sizes(attention):
  config = with_value("model.query", "state", arg=attention)
  config["model"]["cell"] = "lstm"
  parse(config)
  config["model"]["local_score"] = "dot"
  with pytest.raises(UserError, match=r"score 'dot' needs .* equal size"):
    parse(config)


def test_a_normalizer_without_attention_is_rejected():
  config = with_value("model.normalizer", "entmax", arg="none")
  with pytest.raises(UserError, match="'entmax' has no effect with attention"):
    parse(config)


@pytest.mark.parametrize(
  ("arg", "field"), [("local_p", "attention"), ("transformer", "score")]
)
def test_local_p_needs_a_softmax(arg, field):
  config = with_value(f"model.{field}", "local_p", arg=arg)
  config["model"]["normalizer"] = "softmax_sink"
  parse(config)
  config["model"]["normalizer"] = "sigmoid"
  message = f"{field} 'local_p' multiplies the weights of a softmax"
  with pytest.raises(UserError, match=message):
    parse(config)


@pytest.mark.parametrize("normalizer", modules.NORMALIZER_NAMES)
def test_sharded_sequences_need_a_normalizer_that_can_be_merged(normalizer):
  config = with_value("model.normalizer", normalizer, arg="transformer")
  config["mesh"]["sequence"] = 2
  if normalizer in ("softmax", "softmax_sink", "sigmoid"):
    parse(config)
  else:
    message = f"config.mesh.sequence: 2, but the normalizer '{normalizer}'"
    with pytest.raises(UserError, match=message):
      parse(config)


@pytest.mark.parametrize(
  ("field", "value", "named"),
  [
    ("forget_gate", True, "forget_gate"),
    ("score", "forgetting", "score 'forgetting'"),
  ],
)
def test_sharded_sequences_have_no_forget_gate(field, value, named):
  config = raw("transformer")
  config["model"][field] = value
  parse(config)
  config["mesh"]["sequence"] = 2
  with pytest.raises(UserError, match=rf"config\.model\.{named} sums over all"):
    parse(config)


def test_forget_gates_are_chosen_once():
  config = with_value("model.score", "forgetting", arg="transformer")
  config["model"]["forget_gate"] = True
  with pytest.raises(UserError, match="no effect with score 'forgetting'"):
    parse(config)


def test_names_of_scores_and_implementations_are_those_of_the_library():
  known = modules.SCORE_NAMES + modules.POSITIONAL_SCORE_NAMES
  assert {*typing.get_args(RecurrentScoreName)} < {*known}
  assert typing.get_args(ImplementationName) == ("auto", *BY_NAME)


def test_parsing_does_not_change_its_argument():
  config = raw()
  before = copy.deepcopy(config)
  parse(config)
  assert config == before


@pytest.mark.parametrize("sampling", [0.0, 0.1])
def test_stored_sampling_is_refused_unless_zero(sampling):
  config = text() | {"version": 1}
  config["data"]["target_tokenizer"]["sampling"] = sampling
  if sampling:
    with pytest.raises(UserError, match=r"target_tokenizer\.sampling: no long"):
      parse_stored(config)
  else:
    assert parse_stored(config).data == parse(text()).data
