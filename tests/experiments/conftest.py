"""A run and a corpus so small that a test can afford them."""

import fcntl
import itertools
import json
import os
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from configs import base, translation
from experiments.optimization import losses
from tests.experiments import processes

# Who, does what and where, in English and in German.
_PHRASES = (
  (("a dog", "ein Hund"), ("two men", "zwei Männer"), ("the girl", "das Kind")),
  (("runs", "läuft"), ("sleeps", "schläft"), ("sings", "singt ein Lied")),
  (
    ("in the snow.", "im Schnee."),
    ("near a big red house.", "bei einem großen roten Haus."),
    ("today!", "heute!"),
    ("on the bank of the river.", "am Ufer des Flusses."),
    ("with a friend.", "mit einem Freund."),
  ),
)


class Complete(NamedTuple):
  """An undisturbed run that a binary has trained."""

  config: os.PathLike
  workdir: os.PathLike
  out: str
  error: str


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
  """A run of `make_tiny`, trained once for all of pytest's workers."""
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent
  output = folder / "complete.json"
  with (folder / "complete.lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    config, workdir = folder / "tiny.py", folder / "complete"
    if not output.exists():
      processes.write_config(folder)
      out, error = processes.succeeded(
        "train", f"--config={config}", f"--workdir={workdir}"
      )
      output.write_text(json.dumps([out, error]))
  return Complete(config, workdir, *json.loads(output.read_text()))


@pytest.fixture
def non_finite_losses(monkeypatch):
  """Makes the loss, and so the gradient, of some batches NaN."""
  make = losses.sharded_cross_entropy

  def non_finite(features, readout, labels, *rest):
    loss, hits = make(features, readout, labels, *rest)
    return jnp.where(labels[0, 0] % 3 == 0, jnp.nan, 1.0) * loss, hits

  monkeypatch.setattr(losses, "sharded_cross_entropy", non_finite)


def make_tiny(arg: str = ""):
  """The base config, made small; `arg` as for `base.get_config`."""
  config = base.get_config(arg)
  config.data.symbols = 6
  config.data.max_length = 4
  config.data.splits = {
    "validation": base.split(1, 4, 16),
    "test": base.split(1, 4, 16),
    "longer": base.split(5, 6, 16),
  }
  make_model_small(config)
  config.train.update(
    steps=12, batch_size=16, log_every=2, eval_every=6, checkpoint_every=3
  )
  return config


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
  """A folder with 45 sentence pairs: train, val and test, .en and .de."""
  folder = tmp_path_factory.mktemp("corpus")
  pairs = [
    [" ".join(words) for words in zip(*parts)]
    for parts in itertools.product(*_PHRASES)
  ]
  for name, rows in (
    ("train", pairs),
    ("val", pairs[::4]),
    ("test", pairs[::3]),
  ):
    for language, lines in zip(("en", "de"), zip(*rows)):
      text = "".join(f"{line}\n" for line in lines)
      (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
  return folder


def read_little(config, folder):
  """Lets a config for text read the fixture's corpus, or few numbers."""
  if config.data.name == "numbers":
    for each in (config.data.train, *config.data.splits.values()):
      each.num_examples = 100
  if config.data.name == "text":
    splits = {"validation": "val", "test": "test"}
    config.data.update(dir=str(folder), train="train", splits=splits)
    for side in ("source_tokenizer", "target_tokenizer"):
      config.data[side].vocabulary_size = 60
  return config


def make_tiny_translation(folder, arg: str = ""):
  """`configs/translation.py`, made small; `arg` as for `base.get_config`."""
  config = translation.get_config(arg)
  for side in ("source_tokenizer", "target_tokenizer"):
    config.data[side] = base.tokenizer("words", 60)
  config.data.update(max_length=16, num_shapes=2)
  read_little(config, folder)
  make_model_small(config)
  config.optimizer.update(learning_rate=3e-3, warmup_steps=4)
  config.train.update(
    steps=8,
    batch_size=128,
    log_every=2,
    eval_every=4,
    checkpoint_every=2,
    keep_last=2,
  )
  config.evaluation.update(checkpoint="last:2", beam_size=2)
  return config


def make_model_small(config):
  if config.model.name == "seq2seq":
    config.model.update(embedding_size=8, hidden_size=8, attention_size=8)
  else:
    config.model.update(
      model_size=8,
      feed_forward_size=8,
      num_heads=2,
      encoder_layers=1,
      decoder_layers=1,
    )
