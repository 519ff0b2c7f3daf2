"""Measures the preparation and reading of a large synthetic corpus.

    python -m benchmarks.corpus --pairs=10000000 --dir=DIR

DIR needs 5 GB for ten million pairs. Sentences have 25 words, drawn from 30,000
by Zipf's law. Prints JSON: the seconds that counting the pairs and training the
tokenizer take, the pairs encoded per second, and, for this corpus and for one
of 29,000 pairs, the seconds from the start of a process to its first batch, the
batches read per second divided by the training steps of a Transformer
(configs/multi30k.py) per second, and the memory of the training process.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import multi30k
from experiments import cli
from experiments.config import TextConfig, parse
from experiments.data import pipeline
from experiments.data.dataset import BatchShard
from experiments.data.text import prepare

_PAIRS = flags.DEFINE_integer("pairs", 1_000_000, "Pairs of the corpus.")
_DIR = flags.DEFINE_string("dir", None, "Directory of the files.")
_MEASURE = flags.DEFINE_string(
  "measure", None, "Measures one prepared corpus; started by the benchmark."
)

_WORDS, _VOCABULARY, _BLOCK, _SMALL = 25, 30_000, 50_000, 29_000
_STEPS = 40


def make_config(folder: Path) -> ConfigDict:
  """The config of a corpus that `write_corpus` has written."""
  config = multi30k.get_config()
  config.data.update(dir=str(folder), train="train")
  config.data.splits = ConfigDict({"validation": "validation"})
  config.train.update(steps=_STEPS)
  return config


def write_corpus(folder: Path, num_pairs: int) -> None:
  """Writes random text, unless it is there."""
  if (folder / "complete").exists():
    return
  folder.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(0)
  letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
  words = np.array(
    ["".join(rng.choice(letters, n)) for n in rng.integers(2, 11, _VOCABULARY)]
  )
  shares = 1 / np.arange(1, _VOCABULARY + 1)
  bounds = np.cumsum(shares / shares.sum())
  for name, count in (("train", num_pairs), ("validation", 1000)):
    for language in ("en", "de"):
      with (folder / f"{name}.{language}").open("w") as file:
        for start in range(0, count, _BLOCK):
          size = min(_BLOCK, count - start), _WORDS
          drawn = np.searchsorted(bounds, rng.random(size)).clip(
            max=_VOCABULARY - 1
          )
          file.writelines(" ".join(row) + "\n" for row in words[drawn])
  (folder / "complete").touch()


def prepare_corpus(folder: Path, workdir: Path) -> dict[str, float]:
  """Prepares a run, and times its parts."""
  config = parse(make_config(folder).to_dict()).data
  assert isinstance(config, TextConfig)
  shutil.rmtree(workdir, ignore_errors=True)
  text = prepare.TrainingText(config)
  begin = time.perf_counter()
  record = prepare.write_tokenizers_and_sets(text, workdir)
  trained = time.perf_counter()
  data = prepare.prepare(config, workdir)
  encoded = time.perf_counter()
  assert data.corpus is not None
  return {
    "counting_and_tokenizer_seconds": trained - begin,
    "encoding_seconds": encoded - trained,
    "encoded_pairs_per_second": record["pairs"] / (encoded - trained),
  }


def measure(folder: Path, workdir: Path, begin: float) -> dict[str, float]:
  """Times reading and training, in a process that began at `begin`."""
  config = make_config(folder)
  typed = parse(config.to_dict())
  assert isinstance(typed.data, TextConfig)
  data = prepare.prepare(typed.data, workdir)
  batches = data.training_batches(typed.train, seed=0, shard=BatchShard())
  batches[0]
  first = time.time() - begin
  stream = pipeline.Stream(batches, 1000)
  start = time.perf_counter()
  count = sum(1 for _ in stream)
  rate = count / (time.perf_counter() - start)
  from benchmarks.translation.speed import training_speed  # imports JAX

  step = training_speed(config, workdir, _STEPS)["milliseconds"]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return {
    "first_batch_seconds": first,
    "batches_per_second": rate,
    "batches_per_training_step": rate * step / 1e3,
    "peak_memory_mib": peak / 1024,
  }


def measured_alone(folder: Path, workdir: Path) -> dict[str, float]:
  """`measure` in a process of its own."""
  command = [sys.executable, "-m", "benchmarks.corpus", f"--dir={folder}"]
  command.append(f"--measure={workdir}:{time.time()}")
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  """Prints the figures as JSON."""
  folder = Path(str(_DIR.value))
  if _MEASURE.value:
    prepared, _, begin = _MEASURE.value.rpartition(":")
    print(json.dumps(measure(folder, Path(prepared), float(begin))))
    return
  result: dict[str, dict[str, float]] = {}
  for num_pairs in (_PAIRS.value, _SMALL):
    corpus = folder / f"corpus-{num_pairs}"
    workdir = folder / f"run-{num_pairs}"
    write_corpus(corpus, num_pairs)
    figures = prepare_corpus(corpus, workdir)
    result[f"{num_pairs} pairs"] = figures | measured_alone(corpus, workdir)
  print(json.dumps(result, indent=2))


if __name__ == "__main__":
  flags.mark_flag_as_required("dir")
  cli.run(main)
