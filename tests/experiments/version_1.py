"""Two small runs that version 1 of the config's schema wrote."""

import pathlib
import tarfile

_ARCHIVE = pathlib.Path(__file__).parents[1] / "data/runs_of_version_1.tar.xz"


def extract(folder: pathlib.Path) -> pathlib.Path:
  """Writes the run directories `reverse` and `translation` into a folder."""
  # Python 3.11.3 and older have no filters, 3.12 and 3.13 warn without one.
  options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
  with tarfile.open(_ARCHIVE) as archive:
    archive.extractall(folder, **options)
  return folder
