"""Measures training and decoding speed, and JoeyNMT's if it is installed."""

import json
import pathlib
import statistics
import tempfile

from absl import app, flags

from experiments.distributed import initialize

_DATA = flags.DEFINE_string(
  "data", None, "Directory of Multi30k's files.", required=True
)
_JOEYNMT = flags.DEFINE_string(
  "joeynmt", None, "The Python interpreter of an environment with JoeyNMT."
)
_MODELS = flags.DEFINE_list(
  "models", ["transformer", "rnn"], "The models to measure."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Runs of each, taken in turn.", lower_bound=1
)
_UPDATES = flags.DEFINE_integer(
  "updates", 60, "Training steps of each run.", lower_bound=20
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of a trained run; its test set is decoded by both.",
)
_FOLDER = flags.DEFINE_string(
  "folder", None, "Directory for JoeyNMT's files; by default a temporary one."
)
_WRITE = flags.DEFINE_bool(
  "write", False, "Write the results to docs/results/."
)
_RESULTS = pathlib.Path("docs/results/translation_speed.json")


def main(_) -> None:
  """Prints the results, and writes them on request."""
  initialize.set_up_jax()
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(_FOLDER.value or temporary)
    peer = _peer(folder)
    results = {model: _training(model, folder, peer) for model in _MODELS.value}
    results["width 512"] = _wide(folder)
    if _WORKDIR.value:
      results["decoding"] = _decoding(peer)
  print(json.dumps(results, indent=1))
  if _WRITE.value:
    _RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _peer(folder: pathlib.Path):
  from benchmarks.translation.joeynmt import JoeyNMT

  if not _JOEYNMT.value:
    print("not compared with JoeyNMT: give --joeynmt=PYTHON")
    return None
  peer = JoeyNMT(_JOEYNMT.value, folder.absolute() / "joeynmt")
  peer.prepare(pathlib.Path(str(_DATA.value)))
  return peer


def _training(model: str, folder: pathlib.Path, peer) -> dict:
  """Training speed of our run and of JoeyNMT's, taken in turn."""
  from benchmarks.translation import configs, speed

  config = configs.ours(model, str(_DATA.value))
  rounds = []
  for _ in range(_ROUNDS.value):
    found = speed.training_speed(config, folder / model, _UPDATES.value)
    found["machine_gigaflops"] = speed.machine_gigaflops()
    if peer:
      speeds = peer.training_speed(model, _UPDATES.value)
      found["joeynmt_tokens_per_second"] = statistics.median(speeds)
    rounds.append(found)
    print(model, json.dumps(found), flush=True)
  ratios = [
    found["tokens_per_second"] / found["joeynmt_tokens_per_second"]
    for found in rounds
    if peer
  ]
  return {"rounds": rounds, "ratio": statistics.median(ratios or [0])}


def _wide(folder: pathlib.Path) -> dict:
  """The share of the machine's peak that a Transformer of width 512 reaches."""
  from benchmarks.translation import configs, speed

  config = configs.ours("transformer", str(_DATA.value))
  config.model.update(model_size=512, feed_forward_size=2048, num_heads=8)
  config.data.num_shapes = 1
  found = speed.training_speed(config, folder / "wide", 3)
  found["machine_gigaflops"] = speed.machine_gigaflops()
  found["share"] = found["gigaflops"] / found["machine_gigaflops"]
  print("width 512", json.dumps(found), flush=True)
  return found


def _decoding(peer) -> dict:
  """Sentences per second on the test set, with beam size 5 and greedy."""
  from benchmarks.translation import speed

  workdir = pathlib.Path(str(_WORKDIR.value))
  found: dict = {
    f"beam {size}": speed.decoding_speed(workdir, size) for size in (5, 1)
  }
  print("decoding", json.dumps(found), flush=True)
  if peer:
    found["joeynmt beam 5"] = peer.decoding_speed(workdir)
    found["ratio"] = (
      found["beam 5"]["sentences_per_second"]
      / found["joeynmt beam 5"]["sentences_per_second"]
    )
  return found


if __name__ == "__main__":
  app.run(main)
