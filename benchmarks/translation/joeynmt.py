"""Runs JoeyNMT in its own interpreter, and reads the speed that it logs."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import re
import subprocess

import sentencepiece

from benchmarks.translation import configs
from benchmarks.translation.joeynmt_export import export
from experiments import inference

_DECODE = pathlib.Path(__file__).with_name("joeynmt_decode.py")
_SETS = ("train", "val", "test_2016_flickr")


@dataclasses.dataclass(frozen=True)
class JoeyNMT:
  """JoeyNMT, installed for the interpreter `python`, with files in `folder`."""

  python: str
  folder: pathlib.Path

  def prepare(self, data: pathlib.Path) -> None:
    """Unpacks Multi30k's .gz files, and trains subwords as for our models."""
    self.folder.mkdir(parents=True, exist_ok=True)
    for name, side in itertools.product(_SETS, ("en", "de")):
      text = gzip.decompress((data / f"{name}.{side}.gz").read_bytes())
      (self.folder / f"{name}.{side}").write_bytes(text)
    sentencepiece.SentencePieceTrainer.train(
      input=[f"{self.folder}/train.{side}" for side in ("en", "de")],
      model_prefix=f"{self.folder}/joint",
      vocab_size=configs.VOCABULARY_SIZE,
      character_coverage=1.0,
      normalization_rule_name="identity",
      unk_id=0,
      pad_id=1,
      bos_id=2,
      eos_id=3,
      num_threads=1,
      minloglevel=4,
    )
    pieces = (self.folder / "joint.vocab").read_text().splitlines()
    words = [line.split("\t")[0] for line in pieces]
    (self.folder / "vocab.txt").write_text("".join(f"{w}\n" for w in words))

  def training_speed(self, model: str, updates: int) -> list[float]:
    """Trains a new model; target tokens per second of each ten updates.

    The first ten are left out.
    """
    log = self._run("-m", "joeynmt", "train", self._config(model, updates))
    speeds = re.findall(r"Tokens per Sec: +(\d+)", log)
    return [float(speed) for speed in speeds[1:]]

  def decoding_speed(
    self, workdir: pathlib.Path, beam_size: int
  ) -> dict[str, float]:
    """Decodes the test set with the weights of our run.

    JoeyNMT's own timer excludes loading and scoring.
    """
    folder = self.folder / "trained"
    export(inference.restore(workdir), workdir, folder)
    config = self._config("transformer", 0, folder, beam_size)
    # -P: else this directory's joeynmt.py would shadow the package.
    out = self._run("-P", str(_DECODE), config, str(folder / "trained.npz"))
    return json.loads(out.splitlines()[-1])

  def _config(
    self,
    model: str,
    updates: int,
    subwords: pathlib.Path | None = None,
    beam_size: int = 5,
  ) -> str:
    config = configs.joeynmt(
      model, str(self.folder), updates, str(subwords or self.folder)
    )
    config["testing"]["beam_size"] = beam_size
    path = self.folder / f"{model}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)

  def _run(self, *arguments: str) -> str:
    extra = ("--skip-test",) if "train" in arguments else ()
    done = subprocess.run(
      [self.python, *arguments, *extra],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT if extra else subprocess.PIPE,
      text=True,
      check=False,
    )
    if done.returncode:
      raise RuntimeError(f"JoeyNMT failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout
