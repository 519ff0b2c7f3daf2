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

from experiments.run_directory.claim import CONFIG as CONFIG
from experiments.run_directory.claim import check_same as check_same
from experiments.run_directory.claim import claim as claim
from experiments.run_directory.claim import effective_config as effective_config
from experiments.run_directory.claim import read_config as read_config
from experiments.run_directory.claim import release as release
from experiments.run_directory.fields import set_field as set_field
from experiments.run_directory.files import write_json as write_json
from experiments.run_directory.files import write_text as write_text
from experiments.run_directory.lock import locked as locked
from experiments.run_directory.symlinks import check_links as check_links
from experiments.run_directory.versions import note_versions as note_versions
