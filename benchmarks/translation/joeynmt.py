"""JoeyNMT's speed, by its own account, in an interpreter of its own."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import re
import subprocess

import sentencepiece

from benchmarks.translation import settings
from benchmarks.translation.handover import hand_over
from experiments import inference

_DECODE = pathlib.Path(__file__).with_name("joeynmt_decode.py")
_SETS = ("train", "val", "test_2016_flickr")


@dataclasses.dataclass(frozen=True)
class JoeyNMT:
  """The peer.

  Attributes:
    python: an interpreter that has it.
    folder: holds its data and its runs.
  """

  python: str
  folder: pathlib.Path

  def prepare(self, data: pathlib.Path) -> None:
    """Unpacks the text, and trains its subwords as ours are.

    Args:
      data: Multi30k's raw files, as .gz.
    """
    self.folder.mkdir(parents=True, exist_ok=True)
    for name, side in itertools.product(_SETS, ("en", "de")):
      text = gzip.decompress((data / f"{name}.{side}.gz").read_bytes())
      (self.folder / f"{name}.{side}").write_bytes(text)
    sentencepiece.SentencePieceTrainer.train(
      input=[f"{self.folder}/train.{side}" for side in ("en", "de")],
      model_prefix=f"{self.folder}/joint",
      vocab_size=settings.VOCABULARY_SIZE,
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
    """Trains anew, and leaves a checkpoint.

    Args:
      model: one of `settings.MODELS`.
      updates: how many.

    Returns:
      Target tokens a second, of each ten updates but the first ten.
    """
    log = self._run("-m", "joeynmt", "train", self._config(model, updates))
    speeds = re.findall(r"Tokens per Sec: +(\d+)", log)
    return [float(speed) for speed in speeds[1:]]

  def decoding_speed(self, workdir: pathlib.Path) -> dict[str, float]:
    """Decodes the test set with beam 5, and with weights that we trained.

    Args:
      workdir: of the run of a Transformer, as `hand_over` takes.

    Returns:
      sentences_per_second by JoeyNMT's own clock, which leaves out loading and
      scoring, tokens an answer, and BLEU.
    """
    folder = self.folder / "trained"
    hand_over(inference.restore(workdir), workdir, folder)
    config = self._config("transformer", 0, folder)
    # -P: or this folder's joeynmt.py stands before the package of that name.
    out = self._run("-P", str(_DECODE), config, str(folder / "trained.npz"))
    return json.loads(out.splitlines()[-1])

  def _config(
    self, model: str, updates: int, subwords: pathlib.Path | None = None
  ) -> str:
    config = settings.joeynmt(
      model, str(self.folder), updates, str(subwords or self.folder)
    )
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
