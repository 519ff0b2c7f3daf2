"""Measures translation, side by side with JoeyNMT where there is one."""

import json
import pathlib
import statistics
import tempfile

from absl import app, flags

from experiments.distributed import initialize

_DATA = flags.DEFINE_string("data", None, "Multi30k's files.", required=True)
_JOEYNMT = flags.DEFINE_string(
  "joeynmt", None, "The Python of an environment with JoeyNMT."
)
_MODELS = flags.DEFINE_list("models", ["transformer", "rnn"], "Which models.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Pairs of runs.", lower_bound=1)
_UPDATES = flags.DEFINE_integer(
  "updates", 60, "Of a run, each.", lower_bound=20
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "A trained run, whose test set both decode."
)
_FOLDER = flags.DEFINE_string("folder", None, "Where JoeyNMT works.")
_WRITE = flags.DEFINE_bool("write", False, "Keep the results in docs/.")
_RESULTS = pathlib.Path("docs/results/translation_speed.json")


def main(_) -> None:
  """Measures, prints, and keeps the results on request."""
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
    print("JoeyNMT is left out: give --joeynmt=PYTHON to compare with it")
    return None
  peer = JoeyNMT(_JOEYNMT.value, folder.absolute() / "joeynmt")
  peer.prepare(pathlib.Path(str(_DATA.value)))
  return peer


def _training(model: str, folder: pathlib.Path, peer) -> dict:
  """Our run and JoeyNMT's, in turn."""
  from benchmarks.translation import ours, settings

  config = settings.ours(model, str(_DATA.value))
  rounds = []
  for _ in range(_ROUNDS.value):
    found = ours.training_speed(config, folder / model, _UPDATES.value)
    found["machine_gigaflops"] = ours.machine_gigaflops()
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
  """A Transformer of width 512: the share of the machine's rate it reaches."""
  from benchmarks.translation import ours, settings

  config = settings.ours("transformer", str(_DATA.value))
  config.model.update(model_size=512, feed_forward_size=2048, num_heads=8)
  config.data.num_shapes = 1
  found = ours.training_speed(config, folder / "wide", 3)
  found["machine_gigaflops"] = ours.machine_gigaflops()
  found["share"] = found["gigaflops"] / found["machine_gigaflops"]
  print("width 512", json.dumps(found), flush=True)
  return found


def _decoding(peer) -> dict:
  """Sentences a second of the test set, beam 5 and greedy."""
  from benchmarks.translation import ours

  workdir = pathlib.Path(str(_WORKDIR.value))
  found: dict = {
    f"beam {size}": ours.decoding_speed(workdir, size) for size in (5, 1)
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
