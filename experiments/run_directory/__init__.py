"""A run directory, which has these files.

- config.json: the complete config
- metrics.jsonl: an object per line with the step, the split and metrics
- timings.jsonl: times and speeds, in the same format
- versions.json: library versions at the run's start
- .lock: the lock of the training process
- checkpoints/: of Orbax; damaged/ has those that cannot be read
- tokenizer/, data/: of text; see `data/text/dataset.py`
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
from experiments.run_directory.files import check_links as check_links
from experiments.run_directory.files import write_json as write_json
from experiments.run_directory.files import write_text as write_text
from experiments.run_directory.lock import locked as locked
from experiments.run_directory.versions import note_versions as note_versions
