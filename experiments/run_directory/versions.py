"""The versions that a run began with."""

import importlib.metadata
import platform
from pathlib import Path

from absl import logging

from experiments.errors import UserError
from experiments.run_directory.diff import differences
from experiments.run_directory.files import read_json, write_json

VERSIONS = "versions.json"
# What can change a run's numbers.
_MATTER = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "sentencepiece")


def note_versions(workdir: Path) -> None:
  """Writes down what a run begins with, or warns if that was something else.

  Args:
    workdir: the run's directory.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   note_versions(Path(folder))
    ...   "jax" in read_json(Path(folder) / VERSIONS)
    True
  """
  path = workdir / VERSIONS
  ours = {"python": platform.python_version()}
  ours |= {name: importlib.metadata.version(name) for name in _MATTER}
  if not path.exists():
    write_json(path, ours)
    return
  try:
    theirs = read_json(path)
  except UserError as error:  # a note, which no run depends on
    logging.warning("%s; the versions of its beginning are unknown", error)
    return
  if lines := differences(ours, theirs, "version"):
    logging.warning(
      "the run began with other versions, results may differ in last digits:"
      " %s",
      "; ".join(line.removeprefix("version.") for line in lines),
    )
