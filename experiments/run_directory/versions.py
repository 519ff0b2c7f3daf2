"""Records the library versions that a run began with."""

import importlib.metadata
import platform
from pathlib import Path

from absl import logging

from experiments.errors import UserError
from experiments.run_directory.fields import differences
from experiments.run_directory.files import read_json, write_json

VERSIONS = "versions.json"
# Libraries that can change a run's numbers.
_LIBRARIES = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "numpy",
  "grain",
  "sentencepiece",
)


def note_versions(workdir: Path) -> None:
  """Writes versions.json, or warns if the versions in it are others."""
  path = workdir / VERSIONS
  ours = {"python": platform.python_version()}
  ours |= {name: importlib.metadata.version(name) for name in _LIBRARIES}
  if not path.exists():
    write_json(path, ours)
    return
  try:
    theirs = read_json(path)
  except UserError as error:  # Training does not need this file.
    logging.warning("%s; the run's first versions are unknown", error)
    return
  if found := differences(ours, theirs):
    logging.warning(
      "the run began with other versions, so the last digits of results may"
      " differ: %s",
      "; ".join(
        f"{name}: {old} then, {new} now" for name, (new, old) in found.items()
      ),
    )
