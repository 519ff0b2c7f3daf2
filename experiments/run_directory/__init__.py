"""A run's directory: whose it is, and where in it things stand.

- config.json: the config, complete
- metrics.jsonl: one object a line, step, split, name: value
- timings.jsonl: what the clock said, likewise
- versions.json: of what the run began with
- .lock: held by the process that trains
- checkpoints/: Orbax; damaged/ holds those that could not be read
- tokenizer/, data/: of a run on text; see `data/translation.py`
- eval/SPLIT.json: metrics of an evaluation set, and by length
- eval/SPLIT.txt: its answers
- figures/: alignments, accuracy by length
- events.*: TensorBoard
"""

from experiments.run_directory.claim import (
  CONFIG,
  check_same,
  claim,
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
  "locked",
  "note_versions",
  "read_config",
  "release",
  "write_json",
  "write_text",
]
