"""Records the library versions at the start of a run."""

import importlib.metadata
import platform
from pathlib import Path

from absl import logging

from experiments.errors import UserError
from experiments.run_directory.fields import differences
from experiments.run_directory.files import read_json, write_json

VERSIONS = "versions.json"
# Libraries whose version can change the results.
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
  """Writes versions.json, or warns if the versions in it differ."""
  path = workdir / VERSIONS
  ours = {"python": platform.python_version()}
  ours |= {name: importlib.metadata.version(name) for name in _LIBRARIES}
  if not path.exists():
    write_json(path, ours)
    return
  try:
    theirs = read_json(path)
  except UserError as error:  # Training does not need this file.
    logging.warning("%s; library versions are not compared", error)
    return
  changed = [
    f"{name}: stored {old}, now {new}"
    for name, (new, old) in differences(ours, theirs).items()
  ]
  if changed:
    logging.warning(
      "the run began with other versions, so the last digits of results may"
      " differ: %s",
      "; ".join(changed),
    )
