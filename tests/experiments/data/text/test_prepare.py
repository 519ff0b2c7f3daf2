"""Prepared corpora: the run directory has everything that using it needs."""

import collections
import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import base
from experiments import progress
from experiments.config import NumbersConfig, TextConfig, TrainConfig, parse
from experiments.data.batch import EOS, PAD
from experiments.data.dataset import BatchShard
from experiments.data.text import dataset, prepare, tokenized
from experiments.data.text import tokenizer as tokenizer_lib
from experiments.data.text.readers import ParallelText
from experiments.errors import UserError

SOURCE = ["one dog", "two dogs run", "a cat sleeps", "", "cats run"] * 4
TARGET = ["ein Hund", "zwei Hunde", "eine Katze", "nichts", ""] * 4


@pytest.fixture
def corpus(tmp_path):
  """A folder with the files of a corpus."""
  folder = tmp_path / "corpus"
  folder.mkdir()
  write(folder, "train", SOURCE, TARGET)
  write(folder, "val", ["two dogs", "", "a cat"], ["zwei Hunde", "a", ""])
  write(folder, "test", ["one cat " * 9, "dogs"], ["Hund", "Katze " * 9])
  return folder


def write(folder, name, source, target):
  for language, lines in (("en", source), ("de", target)):
    text = "".join(f"{line}\n" for line in lines)
    (folder / f"{name}.{language}").write_text(text)


def raw(folder, **changes):
  tokenizer = base.tokenizer("words", 50)
  return (
    base.text().to_dict()
    | {"source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    | {"dir": str(folder), "max_length": 8, "num_shapes": 2}
    | changes
  )


def text_config(folder, **changes):
  return TextConfig(**raw(folder, **changes))


def refused(make, config, workdir):
  with pytest.raises(UserError) as caught:
    make(config, workdir)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def batches(data):
  train = TrainConfig(batch_size=20, batch_unit="tokens", row_multiple=1)
  return data.training_batches(train, seed=0, shard=BatchShard())


def assert_same_sets(ours, theirs):
  for split in ("validation", "test"):
    one, other = ours.evaluation_set(split), theirs.evaluation_set(split)
    jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)
    assert one.text == other.text


def test_a_wrong_init_from_is_named(corpus, tmp_path):
  with pytest.raises(UserError, match=r"^config\.train\.init_from=no: not a r"):
    prepare.prepare(text_config(corpus), tmp_path / "run", init_from=Path("no"))


def test_run_directory_suffices_without_the_corpus(corpus, tmp_path):
  config = text_config(corpus)
  prepared = prepare.prepare(config, tmp_path / "run")
  shutil.rmtree(corpus)
  shutil.move(tmp_path / "run", tmp_path / "moved")
  loaded = dataset.TranslationDataset(config, tmp_path / "moved")
  assert loaded.corpus is None
  shutil.copytree(tmp_path / "moved", tmp_path / "run")
  assert_same_sets(prepared, loaded)
  text = loaded.evaluation_set("validation").text
  assert text == (["two dogs", "", "a cat"], ["zwei Hunde", "a", ""])
  for side in ("source", "target"):
    ours, theirs = getattr(prepared, side), getattr(loaded, side)
    assert ours.model == theirs.model


def test_resumed_run_reuses_its_tokenizers(corpus, tmp_path, monkeypatch):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepared = prepare.prepare(config, workdir)
  monkeypatch.delattr(tokenizer_lib, "train")
  (corpus / "val.en").unlink()  # evaluation sets are not read again either
  again = prepare.prepare(config, workdir)
  assert_same_sets(prepared, again)
  for step in range(30):
    one, other = batches(prepared)[step], batches(again)[step]
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_an_evaluation_set_that_is_the_training_text_warns_once(
  corpus, tmp_path, caplog
):
  splits = {"validation": "./train", "test": "test"}
  config = text_config(corpus, splits=splits)
  for _ in range(2):
    prepare.prepare(config, tmp_path / "run")
  message = "config.data.splits.validation: is the text of config.data.train"
  assert caplog.text.count(message) == 1
  assert "splits.test" not in caplog.text


@pytest.mark.parametrize("language", ["en", "de"])
def test_changed_training_text_is_refused(corpus, tmp_path, language):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepare.prepare(config, workdir)
  file = corpus / f"train.{language}"
  before = file.read_text()
  file.write_text(before.replace("Hund", "Wolf").replace("dog", "wolf"))
  message = refused(prepare.prepare, config, workdir)
  assert message.startswith("config.data.train: the text differs from")
  assert ", from line 1 or later;" in message
  assert message.endswith("use another --workdir")
  # Spaces and line ends are normalised, so they may differ.
  file.write_text(before.replace(" ", "  ").replace("\n", "\r\n"))
  prepare.prepare(config, workdir)


def test_tokens_suffice_to_resume_without_the_corpus(corpus, tmp_path, caplog):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepared = prepare.prepare(config, workdir)
  shutil.rmtree(corpus)
  again = prepare.prepare(config, workdir)
  assert "no longer exists; this run uses the tokens" in caplog.text
  jax.tree.map(
    np.testing.assert_array_equal, batches(prepared)[3], batches(again)[3]
  )


def test_unchanged_files_are_not_read_again(corpus, tmp_path, monkeypatch):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepare.prepare(config, workdir)
  monkeypatch.delattr(prepare.readers, "pairs")
  prepare.prepare(config, workdir)


def test_runs_of_older_versions_are_encoded_once(corpus, tmp_path):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepared = prepare.prepare(config, workdir)
  sides = ("\n".join(side) for side in (SOURCE, TARGET))
  text = "".join(f"{side}\0" for side in sides)
  digest = hashlib.sha256(text.encode()).hexdigest()
  record = workdir / "data" / "corpus.json"
  record.write_text(json.dumps({"pairs": len(SOURCE), "sha256": digest}))
  for name in ("lengths", "tokens", "digests"):
    (workdir / "data" / f"train.{name}").unlink()
  again = prepare.prepare(config, workdir)
  jax.tree.map(
    np.testing.assert_array_equal, batches(prepared)[3], batches(again)[3]
  )
  assert "sha256" not in json.loads(record.read_text())
  record.write_text(json.dumps({"pairs": len(SOURCE), "sha256": digest[::-1]}))
  assert "the text differs" in refused(prepare.prepare, config, workdir)


def test_text_that_changes_during_preparation_is_prepared_anew(
  corpus, tmp_path
):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepare.prepare(config, workdir)
  (workdir / "data" / "train.lengths").write_bytes(b"")
  write(corpus, "train", SOURCE[:4], TARGET[:4])
  data = prepare.prepare(config, workdir)
  assert (len(data.corpus), data.corpus.blank) == (3, 1)
  assert data.source.unknown("one dog") == ""


@pytest.mark.parametrize("has_trained", [False, True])
def test_text_of_a_failed_start_is_prepared_for_another_config(
  has_trained, tmp_path
):
  workdir = tmp_path / "run"
  first = base.numbers().to_dict() | {"train": base.digits(1, 3, 200)}
  other = first | {
    "source_tokenizer": base.tokenizer("characters", 100),
    "seed": first["seed"] + 1,
  }
  prepare.prepare(NumbersConfig(**first), workdir)
  if has_trained:
    (workdir / "checkpoints").mkdir()
  sizes = [
    prepare.prepare(NumbersConfig(**other), folder).source_vocabulary_size
    for folder in (workdir, tmp_path / "fresh")
  ]
  assert (sizes[0] == sizes[1]) == (not has_trained)


def test_interrupted_preparation_is_repeated(corpus, tmp_path):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepared = prepare.prepare(config, workdir)
  (workdir / "data" / "corpus.json").unlink()
  (workdir / "tokenizer" / "target.model").write_bytes(b"half")
  (workdir / "data" / "validation.en").write_text("half")
  again = prepare.prepare(config, workdir)
  assert again.target.model == prepared.target.model
  assert_same_sets(again, prepared)
  record = json.loads((workdir / "data" / "corpus.json").read_text())
  assert record["pairs"] == len(SOURCE)


def test_each_pass_over_the_pairs_shows_its_progress(
  corpus, tmp_path, monkeypatch
):
  shown = collections.Counter()

  @contextlib.contextmanager
  def counting(unit, *, description, **_):
    assert unit == "pair"
    yield lambda count: shown.update({description: count})

  monkeypatch.setattr(progress, "counting", counting)
  monkeypatch.setattr(tokenized, "CHUNK", 5)
  prepare.prepare(text_config(corpus), tmp_path / "run")
  assert shown["counting the pairs"] == len(SOURCE)
  assert shown["encoding the training text"] > 0


@pytest.mark.parametrize("side", ["source", "target"])
def test_missing_or_damaged_tokenizer_is_named(corpus, tmp_path, side):
  config, workdir = text_config(corpus), tmp_path / "run"
  prepare.prepare(config, workdir)
  path = workdir / "tokenizer" / f"{side}.model"
  path.write_bytes(path.read_bytes()[:-50])
  message = f"{path}: no SentencePiece model, or a damaged one"
  assert refused(dataset.TranslationDataset, config, workdir) == message
  path.unlink()
  message = f"{path}: cannot be read (No such file or directory)"
  for make in (dataset.TranslationDataset, prepare.prepare):
    assert refused(make, config, workdir) == message


def test_joint_vocabulary_is_shared(corpus, tmp_path):
  joint = prepare.prepare(text_config(corpus), tmp_path / "joint")
  assert joint.shared_vocabulary
  assert joint.source.model == joint.target.model
  assert joint.source.unknown("Hund dog Katze") == ""
  config = text_config(corpus, joint_vocabulary=False)
  apart = prepare.prepare(config, tmp_path / "apart")
  assert not apart.shared_vocabulary
  assert apart.source.unknown("Hund dog Katze") == "Hund Katze"
  assert apart.target.unknown("Hund dog Katze") == "dog"
  sizes = apart.source_vocabulary_size, apart.target_vocabulary_size
  assert joint.source_vocabulary_size == sum(sizes) - 4


def test_tokenizers_ignore_pairs_that_are_left_out(corpus, tmp_path):
  data = prepare.prepare(text_config(corpus), tmp_path)
  assert data.source.unknown("cats nichts") == "cats nichts"
  assert data.corpus.blank == 8


def test_long_evaluation_sentences_are_cut_not_dropped(corpus, tmp_path):
  data = prepare.prepare(text_config(corpus), tmp_path)
  examples = data.evaluation_set("test")
  assert examples.batch.source.shape == examples.batch.target.shape == (2, 8)
  for row in (examples.batch.source[0], examples.batch.target[1]):
    assert row[-1] == EOS
    assert (row[:-1] > EOS).all()
  assert examples.batch.source[1].tolist()[1:] == [EOS] + [PAD] * 6
  assert examples.text.source[0].split() == ["one", "cat"] * 9
  alone = data.encode(ParallelText(["dogs", ""], ["Hund", "zwei Hunde"]))
  assert [side.shape for side in alone.batch] == [(2, 2), (2, 3)]
  assert alone.batch.source[1].tolist() == [EOS, PAD]


def test_corpus_of_blank_pairs_is_refused(corpus, tmp_path):
  write(corpus, "train", ["a", "", ""], ["", "b", ""])
  assert refused(prepare.prepare, text_config(corpus), tmp_path) == (
    "config.data.train: of 3 pairs none has text on both sides"
  )


def test_a_full_disk_is_reported_with_the_folder(corpus, tmp_path, monkeypatch):
  def write(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(tokenized, "write", write)
  assert refused(prepare.prepare, text_config(corpus), tmp_path / "run") == (
    f"{tmp_path}/run/data: No space left on device; free some space, or use"
    " another --workdir"
  )


def test_files_of_a_set_with_other_numbers_of_lines_are_named(corpus, tmp_path):
  data = prepare.prepare(text_config(corpus), tmp_path)
  path = tmp_path / "data" / "test.de"
  path.write_text("Hund\n")
  with pytest.raises(UserError) as caught:
    data.evaluation_set("test")
  assert str(caught.value) == (
    f"{path.with_suffix('.en')} has 2 lines and {path} has 1 line; line i of"
    " one must translate line i of the other"
  )


def test_one_pair_is_counted_in_the_singular(corpus, tmp_path, caplog):
  write(corpus, "train", ["a dog"], ["ein Hund"])
  with caplog.at_level("INFO", "absl"):
    data = prepare.prepare(text_config(corpus), tmp_path)
  assert "training the tokenizers on 1 pair" in caplog.messages
  assert batches(data).describe()[0].startswith("1 training pair (")


def test_messages_name_the_set_and_the_side(corpus, tmp_path):
  splits = {"validation": "val", "test": "tset"}
  config = text_config(corpus, splits=splits)
  message = refused(prepare.prepare, config, tmp_path)
  assert message.startswith("config.data.splits.test: no file ")
  config = text_config(
    corpus, joint_vocabulary=False, target_tokenizer=base.tokenizer("bpe", 9000)
  )
  message = refused(prepare.prepare, config, tmp_path)
  assert message.startswith(
    "config.data.target_tokenizer.vocabulary_size: 9000"
  )
  both = base.tokenizer("bpe", 9000)
  config = text_config(corpus, source_tokenizer=both, target_tokenizer=both)
  message = refused(prepare.prepare, config, tmp_path)
  assert message.startswith(
    "config.data.source_tokenizer.vocabulary_size and"
    " config.data.target_tokenizer.vocabulary_size: 9000 is more than"
  )


def test_split_may_be_called_train(corpus, tmp_path):
  splits = {"validation": "val", "train": "test"}
  data = prepare.prepare(text_config(corpus, splits=splits), tmp_path)
  assert data.evaluation_set("train").text.source[1] == "dogs"
  assert len(data.corpus) == 12


def test_numbers_are_prepared_like_text(tmp_path):
  digits = {"min_digits": 1, "max_digits": 4, "num_examples": 60}
  tokenizer = base.tokenizer("characters", 50)
  config = NumbersConfig(
    name="numbers",
    train=digits | {"num_examples": 200},
    splits={"validation": digits, "test": digits, "train": digits},
    seed=0,
    source="en",
    target="de",
    source_tokenizer=tokenizer,
    target_tokenizer=tokenizer,
    joint_vocabulary=True,
    max_length=80,
    num_shapes=3,
  )
  data = prepare.prepare(config, tmp_path)
  loaded = dataset.TranslationDataset(config, tmp_path)
  assert_same_sets(data, loaded)
  sets = {
    split: set(loaded.evaluation_set(split).text.source)
    for split in config.splits
  }
  assert {len(each) for each in sets.values()} == {60}
  sources = [data.corpus[index][0] for index in range(len(data.corpus))]
  training = set(data.source.decode(sources))
  assert len(training) == 200
  assert not sets["test"] & sets["validation"]
  for each in sets.values():
    assert not each & training


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a\n", "a b"])
def test_names_cannot_contain_paths(corpus, name):
  config = base.get_config("transformer").to_dict()
  config["data"] = raw(corpus)
  parse(config)
  for change in (
    {"source": name},
    {"splits": {"validation": "val", name: "test"}},
  ):
    with pytest.raises(UserError, match=r"config\.data"):
      parse(config | {"data": raw(corpus, **change)})
