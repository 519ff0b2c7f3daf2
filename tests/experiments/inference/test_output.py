"""Partial files: nothing is written twice and nothing is lost."""

import contextlib
import os

import pytest

from experiments.errors import UserError
from experiments.inference.output import PartialFile

LINES = ["a", "\u00e9\u00e9", "", "b\tc", "d", "e"]


@pytest.mark.parametrize("group_size", [1, 2, 3])
@pytest.mark.parametrize("stop", range(12))
def test_a_stopped_file_continues(tmp_path, stop, group_size):
  path, settings = tmp_path / "new" / "folder" / "out.txt", {"beam_size": 5}
  with contextlib.closing(PartialFile(path, settings, group_size)) as file:
    assert file.num_groups == 0
    file.write(LINES)
  (draft,) = path.parent.iterdir()
  draft.write_bytes(draft.read_bytes()[:stop])
  with contextlib.closing(PartialFile(path, settings, group_size)) as file:
    whole = draft.read_bytes().decode().split("\n")
    assert file.num_groups == (len(whole) - 1) // group_size
    file.write(LINES[file.num_groups * group_size :])
    assert not path.exists()
    file.finish()
  assert [*path.parent.iterdir()] == [path]
  assert path.read_text().split("\n")[:-1] == LINES


def test_other_settings_do_not_continue_a_file(tmp_path):
  path = tmp_path / "out.txt"
  with contextlib.closing(PartialFile(path, {"checkpoint": 1}, 1)) as file:
    file.write(LINES)
  with contextlib.closing(PartialFile(path, {"checkpoint": 2}, 1)) as file:
    assert file.num_groups == 0


def test_a_file_of_lines_that_cannot_be_read_again_begins_anew(tmp_path):
  path = tmp_path / "out.txt"
  for line in ("first", "second"):
    file = PartialFile(path, {}, 1, continues=False)
    assert file.num_groups == 0
    file.write([line])
    file.close()
  (draft,) = tmp_path.iterdir()
  assert draft.read_text() == "second\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only on Linux")
def test_a_full_disk_is_reported_with_the_flag(tmp_path):
  path = tmp_path / "out.txt"
  message = rf"^--out={path}: cannot be written \(No space left on device"
  file = PartialFile(path, {}, 1)
  file.close()
  with (
    open("/dev/full", "wb", buffering=0) as file._file,
    pytest.raises(UserError, match=message),
  ):
    file.write(LINES)


def test_two_processes_do_not_write_the_same_file(tmp_path):
  path = tmp_path / "out.txt"
  with contextlib.closing(PartialFile(path, {}, 1)) as file:
    file.write(["first"])
    with pytest.raises(UserError, match="another process writes it"):
      PartialFile(path, {}, 1)
  with contextlib.closing(PartialFile(path, {}, 1)) as file:
    assert file.num_lines == 1


def test_a_complete_file_is_not_overwritten(tmp_path):
  path = tmp_path / "out.txt"
  path.write_text("kept")
  with pytest.raises(UserError, match="exists; remove it, or use another"):
    PartialFile(path, {}, 1)
  assert path.read_text() == "kept"
  with pytest.raises(UserError, match=r"cannot be written \(Not a directory"):
    PartialFile(path / "folder" / "out.txt", {}, 1)
