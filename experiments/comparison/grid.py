"""The trials of a comparison: every combination of values, with every seed."""

import itertools
import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments import run_directory
from experiments.config import parse
from experiments.errors import UserError

# Exceptions of reading a missing or damaged file.
UNREADABLE = (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile)


class Trial(NamedTuple):
  """One training run of a comparison."""

  values: dict[str, Any]  # the value of each swept field
  seed: int
  raw: dict[str, Any]  # the config, as nested dictionaries
  workdir: Path
  command: tuple[str, ...]  # trains and evaluates this run

  @property
  def group(self) -> str:
    """The name that all seeds of the same values share."""
    return group_name(self.values)

  @property
  def name(self) -> str:
    """The group and the seed."""
    return f"{self.group}, seed {self.seed}"

  @property
  def splits(self) -> list[str]:
    """The names of the evaluation sets."""
    return list(self.raw["data"]["splits"])

  @property
  def attention_weights(self) -> Path:
    """The file of attention weights for examples of the validation set."""
    return self.workdir / "figures" / "alignments_validation.npz"

  def is_complete(self) -> bool:
    """Whether results exist; raises UserError if they are of another config."""
    if not (self.workdir / run_directory.CONFIG).exists():
      return False
    comparison = self.workdir.parent.parent
    if run_directory.check_same(self.workdir, self.raw, given=comparison):
      return False  # training has to update config.json first
    return self._has_weights() and all(map(self._is_evaluated, self.splits))

  def _has_weights(self) -> bool:
    try:
      with np.load(self.attention_weights, allow_pickle=False) as arrays:
        return {"weights", "source", "target"} <= arrays.keys()
    except UNREADABLE:
      return False

  def _is_evaluated(self, split: str) -> bool:
    """Whether a set was evaluated with the config's settings."""
    path = self.workdir / "eval" / f"{split}.json"
    try:
      stored = json.loads(path.read_text(encoding="utf-8"))
      settings = stored.get("config", stored["search"])  # of older versions
    except (*UNREADABLE, AttributeError):
      return False  # the end of training writes a damaged file again
    configured = parse(self.raw).evaluation.model_dump(mode="json")
    return all(configured.get(name) == settings[name] for name in settings)


def group_name(values: Mapping[str, Any]) -> str:
  """The name of a group in the report and in paths, as "dot, num_heads=2"."""
  ends = [field.rpartition(".")[2] for field in values]
  return ", ".join(
    text_of(value)
    if field in ("model.attention", "model.score")
    else f"{end if ends.count(end) == 1 else field}={text_of(value)}"
    for end, (field, value) in zip(ends, values.items())
  )


def text_of(value: Any) -> str:
  """A config value as text for a flag: true, 0.1, dot, None."""
  is_text = value is None or isinstance(value, str)
  return str(value) if is_text else json.dumps(value)


def make_trials(
  config: ConfigDict,
  sweeps: Mapping[str, Sequence[str]],
  *,
  num_seeds: int,
  folder: Path,
  flags: Sequence[str],  # which give a process the same config
) -> list[Trial]:
  """The trials of all combinations of values and seeds; checks the configs."""
  choices = [
    [(field, value) for value in _parse_values(config, field, texts)]
    for field, texts in sweeps.items()
  ]
  trials, groups = [], dict[str, str]()  # by directory
  for combination in itertools.product(*choices):
    values = dict(combination)
    group = group_name(values)
    name = re.sub(r"[^\w.=-]+", "_", group) or "all"
    if name in groups:
      raise UserError(
        f"--sweep: {groups[name]} and {group} have the same directory,"
        f" {folder / name}; compare them in two commands with different"
        " --workdir"
      )
    groups[name] = group
    for seed in range(config.seed, config.seed + num_seeds):
      raw = config.to_dict()
      for field, value in {**values, "seed": seed}.items():
        run_directory.set_field(raw, field, value)
      parse(raw)
      workdir = folder / name / f"seed-{seed}"
      command = (
        sys.executable,
        "-m",
        "experiments.train",
        *flags,
        *(f"--config.{field}={text_of(value)}" for field, value in combination),
        f"--config.seed={seed}",
        f"--workdir={workdir}",
      )
      trials.append(Trial(values, seed, raw, workdir, command))
  return trials


def score_field(config: ConfigDict) -> str:
  """The field that `--scores` sweeps."""
  is_recurrent = config.model.name == "seq2seq"
  return "model.attention" if is_recurrent else "model.score"


def other_runs(trials: Sequence[Trial], folder: Path) -> list[str]:
  """Other run directories in the folder of a comparison."""
  configs = folder.glob(f"*/seed-*/{run_directory.CONFIG}")
  others = {path.parent for path in configs} - {t.workdir for t in trials}
  return sorted(str(workdir.relative_to(folder)) for workdir in others)


def further_seeds(trials: Sequence[Trial], others: Sequence[str]) -> list[str]:
  """Those of `other_runs` that have the values of a trial and another seed."""
  groups = {trial.workdir.parent.name for trial in trials}
  return [run for run in others if Path(run).parent.name in groups]


def parse_sweep(text: str) -> tuple[str, list[str]]:
  """Splits the FIELD=VALUE,VALUE,... of a `--sweep`."""
  field, equals, values = text.partition("=")
  listed = [value.strip() for value in values.split(",")]
  if not (field and equals and all(listed)):
    raise UserError(
      f"--sweep={text}: give a field and its values, as in"
      " --sweep=model.input_feeding=true,false"
    )
  return field.removeprefix("config."), listed


def _parse_values(
  config: ConfigDict, field: str, texts: Sequence[str]
) -> list[Any]:
  """The values of a field; raises UserError if one is repeated."""
  if field == "seed":
    raise UserError("--sweep=seed: set the number of seeds with --seeds")
  current: Any = config
  for name in field.split("."):
    current = current.get(name) if isinstance(current, ConfigDict) else None
  values: list[Any] = []
  for text in texts:
    value = text if isinstance(current, str) else _json_value(text)
    if value in values:
      raise UserError(f"{field}={text_of(value)} is given twice")
    values.append(value)
  return values


def _json_value(text: str) -> Any:
  """The value of a text such as 1e-3, true or None; else the text itself."""
  try:
    return None if text.lower() == "none" else json.loads(text.lower())
  except json.JSONDecodeError:
    return text
