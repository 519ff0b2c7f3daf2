"""A run directory: its config, its lock and its files.

- config.json: the config, complete
- metrics.jsonl: one object per line: step, split, name: value
- timings.jsonl: times and speeds, in the same form
- versions.json: library versions at the run's start
- .lock: held by the process that trains
- checkpoints/: Orbax; damaged/ holds those that could not be read
- tokenizer/, data/: of a run on text; see `data/text/dataset.py`
- eval/SPLIT.json: metrics of an evaluation set, in total and by length
- eval/SPLIT.txt: its predictions
- figures/: attention weights, accuracy by length
- events.*: TensorBoard
"""

from experiments.run_directory.claim import (
  CONFIG,
  check_same,
  claim,
  effective_config,
  read_config,
  release,
)
from experiments.run_directory.files import write_json, write_text
from experiments.run_directory.lock import locked
from experiments.run_directory.symlinks import check_links
from experiments.run_directory.versions import note_versions

__all__ = [
  "CONFIG",
  "check_links",
  "check_same",
  "claim",
  "effective_config",
  "locked",
  "note_versions",
  "read_config",
  "release",
  "write_json",
  "write_text",
]
