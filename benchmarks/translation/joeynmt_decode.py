"""Times JoeyNMT's beam search, in an interpreter that has it installed.

PYTHON joeynmt_decode.py CONFIG WEIGHTS
"""

import json
import logging
import sys
from pathlib import Path


class Duration(logging.Handler):
  """Reads the decoding time from JoeyNMT's log."""

  seconds = 0.0

  def emit(self, record) -> None:
    """Stores the seconds."""
    if str(record.msg).startswith("Generation took"):
      self.seconds = record.args[0]


def main(config: str, weights: str) -> None:
  """Decodes the test set and prints a line of JSON."""
  import numpy as np
  import torch
  from joeynmt.config import load_config, parse_global_args
  from joeynmt.prediction import predict, prepare

  duration = Duration()
  logging.getLogger("joeynmt.prediction").addHandler(duration)
  options = load_config(Path(config))
  checkpoint = Path(weights).with_suffix(".ckpt")
  state = {name: torch.tensor(a) for name, a in np.load(weights).items()}
  torch.save({"model_state": state}, checkpoint)
  options["testing"]["load_model"] = str(checkpoint)
  del options["data"]["train"], options["data"]["dev"]
  given = parse_global_args(options, mode="test")
  model, _, _, data = prepare(given, rank=0, mode="test")
  scores, _, _, tokens, _, _ = predict(
    model=model,
    data=data,
    device=given.device,
    n_gpu=0,
    args=given.test,
    normalization=given.train.normalization,
    autocast=given.autocast,
  )
  result = {
    "sentences_per_second": len(tokens) / duration.seconds,
    "tokens_per_sentence": sum(map(len, tokens)) / len(tokens),
    "bleu": scores["bleu"],
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main(*sys.argv[1:])
