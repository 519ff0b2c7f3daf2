"""Measures training and decoding speed, and that of JoeyNMT and CTranslate2."""

import importlib.util
import json
import pathlib
import statistics
import tempfile
from typing import Any

from absl import flags

from experiments import cli
from experiments.distributed import initialize

_DATA = flags.DEFINE_string(
  "data", None, "Directory of Multi30k's files.", required=True
)
_JOEYNMT = flags.DEFINE_string(
  "joeynmt", None, "The Python interpreter of an environment with JoeyNMT."
)
_MODELS = flags.DEFINE_list(
  "models", ["transformer", "rnn"], "The models to train; none if it is empty."
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
  "Directory of a trained Transformer; its test set is decoded by all.",
)
_FOLDER = flags.DEFINE_string(
  "folder", None, "Directory for JoeyNMT's files; by default a temporary one."
)
_WRITE = flags.DEFINE_bool(
  "write", False, "Write the results to docs/results/, over those measured."
)
_RESULTS = pathlib.Path("docs/results/translation_speed.json")


def main() -> None:
  """Prints the results, and writes them on request."""
  initialize.set_up_jax()
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(_FOLDER.value or temporary)
    peer = _peer(folder)
    results = {model: _training(model, folder, peer) for model in _MODELS.value}
    if _MODELS.value:
      results["width 512"] = _wide(folder)
    if _WORKDIR.value:
      results["decoding"] = _decoding(peer)
  print(json.dumps(results, indent=1))
  if _WRITE.value:
    results = json.loads(_RESULTS.read_text()) | results
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
  result: dict[str, Any] = {"rounds": rounds}
  if peer:
    result["ratio"] = statistics.median(
      found["tokens_per_second"] / found["joeynmt_tokens_per_second"]
      for found in rounds
    )
  return result


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
  """Decoding of the test set, with beam size 5 and greedy, taken in turn."""
  from benchmarks.translation import speed

  workdir = pathlib.Path(str(_WORKDIR.value))
  decoders = {"ours": speed.decoding_speed}
  if peer:
    decoders["joeynmt"] = peer.decoding_speed
  if importlib.util.find_spec("ctranslate2"):
    from benchmarks.translation import ctranslate2_peer

    decoders["ctranslate2"] = ctranslate2_peer.decoding_speed
  results = {}
  for size in (5, 1):
    rounds = []
    for _ in range(_ROUNDS.value):
      found = {name: run(workdir, size) for name, run in decoders.items()}
      print(f"beam {size}", json.dumps(found), flush=True)
      rounds.append(found)
    results[f"beam {size}"] = {"rounds": rounds, "ratios": _ratios(rounds)}
  return results


def _ratios(rounds: list[dict]) -> dict[str, float]:
  """Our sentences per second divided by those of each peer, the medians."""
  ratios: dict[str, float] = {}
  for peer in rounds[0].keys() - {"ours"}:
    ratios[peer] = statistics.median(
      found["ours"]["sentences_per_second"]
      / found[peer]["sentences_per_second"]
      for found in rounds
    )
  return ratios


if __name__ == "__main__":
  cli.run(main)
