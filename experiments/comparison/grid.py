"""The cells of a comparison: every combination of values, with every seed."""

import copy
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
from experiments.config import Config, parse
from experiments.errors import UserError

# What reading a file raises that is missing or damaged.
UNREADABLE = (
  OSError,
  ValueError,
  LookupError,
  EOFError,
  zipfile.BadZipFile,
)


class Cell(NamedTuple):
  """One run of a comparison.

  Attributes:
    values: of each field that is swept.
    seed: the run's.
    raw: its whole config, as nested dictionaries.
    workdir: its directory.
    command: what trains it.
  """

  values: dict[str, Any]
  seed: int
  raw: dict[str, Any]
  workdir: Path
  command: tuple[str, ...]

  @property
  def group(self) -> str:
    """What all seeds of the same values are called."""
    return group_name(self.values)

  @property
  def config(self) -> Config:
    """The typed config."""
    return parse(self.raw)

  @property
  def looks(self) -> Path:
    """The file of where it looks, in sentences of the validation set."""
    return self.workdir / "figures" / "alignments_validation.npz"

  def is_complete(self) -> bool:
    """Whether it has been trained and evaluated.

    Raises:
      UserError: if its directory holds a run of another config.
    """
    if not (self.workdir / run_directory.CONFIG).exists():
      return False
    if run_directory.check_same(self.workdir, self.raw):
      return False  # Training updates config.json.
    return self._has_looks() and all(map(self._is_evaluated, self.splits))

  def _has_looks(self) -> bool:
    try:
      with np.load(self.looks, allow_pickle=False) as found:
        return {"weights", "source", "target"} <= found.keys()
    except UNREADABLE:
      return False

  def _is_evaluated(self, split: str) -> bool:
    """Whether a set has been evaluated, and last as the config says."""
    path = self.workdir / "eval" / f"{split}.json"
    try:
      search = json.loads(path.read_text(encoding="utf-8"))["search"]
    except UNREADABLE:
      return False  # or damaged: training ends by writing it again
    configured = self.raw["evaluation"]
    return all(configured[name] == value for name, value in search.items())

  @property
  def splits(self) -> list[str]:
    """The names of its evaluation sets."""
    return list(self.raw["data"]["splits"])


def group_name(values: Mapping[str, Any]) -> str:
  """Returns what cells of the same values are called.

  Args:
    values: by field; the score alone needs no name.

  Returns:
    A name, for readers and for folders.

  Example:
    >>> group_name({"model.attention": "dot"})
    'dot'
    >>> group_name({"model.attention": "dot", "model.input_feeding": True})
    'dot, input_feeding=true'
  """
  ends = [field.rpartition(".")[2] for field in values]
  return ", ".join(
    text_of(value)
    if field in ("model.attention", "model.score")
    else f"{end if ends.count(end) == 1 else field}={text_of(value)}"
    for end, (field, value) in zip(ends, values.items())
  )


def text_of(value: Any) -> str:
  """Returns a value as a flag takes it.

  Args:
    value: of a field of a config.

  Returns:
    Its text.

  Example:
    >>> text_of(True), text_of(0.1), text_of("dot")
    ('true', '0.1', 'dot')
  """
  return value if isinstance(value, str) else json.dumps(value)


def grid(
  config: ConfigDict,
  sweeps: Mapping[str, Sequence[str]],
  *,
  num_seeds: int,
  folder: Path,
  flags: Sequence[str],
) -> list[Cell]:
  """Returns the cells of a comparison, checked before any of them is trained.

  Args:
    config: what they have in common.
    sweeps: of each field its values, as text.
    num_seeds: runs of each combination, with the config's seed and those
      after it.
    folder: gets a directory for each cell.
    flags: those of the config, as the user gave them.

  Returns:
    Cells, all seeds of a combination after each other.

  Raises:
    UserError: if a field is unknown, or a value does not fit it or is there
      twice.

  Example:
    >>> from configs import base
    >>> cells = grid(
    ...   base.get_config(), {"model.attention": ["none", "dot"]},
    ...   num_seeds=2, folder=Path("runs/c"), flags=["--config=..."],
    ... )
    >>> [(cell.group, cell.seed) for cell in cells]
    [('none', 0), ('none', 1), ('dot', 0), ('dot', 1)]
    >>> str(cells[-1].workdir)
    'runs/c/dot/seed-1'
  """
  choices = [
    [(field, value) for value in _all_parsed(config, field, texts)]
    for field, texts in sweeps.items()
  ]
  cells = []
  for chosen in itertools.product(*choices):
    values = dict(chosen)
    for seed in range(config.seed, config.seed + num_seeds):
      changed = copy.deepcopy(config)
      for field, value in {**values, "seed": seed}.items():
        changed.update_from_flattened_dict({field: value})
      raw = changed.to_dict()
      parse(raw)
      name = re.sub(r"[^\w.=-]+", "_", group_name(values)) or "all"
      place = folder / name / f"seed-{seed}"
      command = (
        sys.executable,
        "-m",
        "experiments.train",
        *flags,
        *(f"--config.{field}={text_of(value)}" for field, value in chosen),
        f"--config.seed={seed}",
        f"--workdir={place}",
      )
      cells.append(Cell(values, seed, raw, place, command))
  return cells


def score_field(config: ConfigDict) -> str:
  """Returns the field of the score.

  Args:
    config: of any model.

  Returns:
    The field that `--scores` sweeps.

  Example:
    >>> from configs import base
    >>> score_field(base.get_config("transformer"))
    'model.score'
  """
  is_recurrent = config.model.name == "seq2seq"
  return "model.attention" if is_recurrent else "model.score"


def left_out(cells: Sequence[Cell], folder: Path) -> list[str]:
  """Returns the runs of a comparison's folder that are not among its cells.

  Args:
    cells: of `grid`.
    folder: of the comparison.

  Returns:
    Their directories below the folder.

  Example:
    >>> left_out([], Path("nowhere"))
    []
  """
  here = {cell.workdir for cell in cells}
  runs = (
    path.parent for path in folder.glob(f"*/seed-*/{run_directory.CONFIG}")
  )
  return sorted(str(run.relative_to(folder)) for run in runs if run not in here)


def parse_sweep(text: str) -> tuple[str, list[str]]:
  """Reads a `--sweep`.

  Args:
    text: FIELD=VALUE,VALUE,...

  Returns:
    The field and its values.

  Raises:
    UserError: if it is no such text.

  Example:
    >>> parse_sweep("model.input_feeding=true,false")
    ('model.input_feeding', ['true', 'false'])
  """
  field, equals, values = text.partition("=")
  listed = [value.strip() for value in values.split(",")]
  if not (field and equals and all(listed)):
    raise UserError(
      f"--sweep={text}: give a field and its values, as in"
      " --sweep=model.input_feeding=true,false"
    )
  return field.removeprefix("config."), listed


def _all_parsed(
  config: ConfigDict, field: str, texts: Sequence[str]
) -> list[Any]:
  """The values of a field, all of them different."""
  if field == "seed":
    raise UserError("--sweep=seed: give the number of seeds by --seeds")
  values = [_parsed(config, field, text) for text in texts]
  for index, value in enumerate(values):
    if value in values[:index]:
      raise UserError(f"{field}={text_of(value)} is to be compared with itself")
  return values


def _parsed(config: ConfigDict, field: str, text: str) -> Any:
  """The value of a field, of the type it has."""
  section: Any = config
  for name in field.split("."):
    if not isinstance(section, ConfigDict) or name not in section:
      raise UserError(
        f"--sweep={field}: the config has no such field; configs/base.py shows"
        " them all"
      )
    section = section[name]
  if isinstance(section, str):
    return text
  try:
    value = json.loads(text.lower())
  except json.JSONDecodeError:
    value = None
  if isinstance(section, float) and isinstance(value, int):
    value = float(value)
  if type(value) is not type(section):
    raise UserError(
      f"--sweep={field}: got {text!r}, but the field holds"
      f" {type(section).__name__}, such as {text_of(section)}"
    )
  return value
