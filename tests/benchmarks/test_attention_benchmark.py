"""Every section of the attention benchmark runs, at tiny shapes."""

import json
import math
import subprocess
import sys

import pytest

from benchmarks.attention import settings
from tests.experiments.processes import ROOT, environment


def run(*arguments):
  command = [sys.executable, "-m", "benchmarks.attention", *map(str, arguments)]
  return subprocess.run(
    command,
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.exhaustive
def test_every_section_at_tiny_shapes(tmp_path):
  path = tmp_path / "figures.json"
  process = run(
    "--quick", "--rounds=2", f"--json={path}", f"--figures={tmp_path}"
  )
  assert process.returncode == 0, process.stderr
  written = json.loads(path.read_text())
  assert set(written["sections"]) == set(settings.SECTIONS)
  for section, rows in written["sections"].items():
    assert rows, section
    for row in rows:
      for contender in row["contenders"]:
        check(section, contender)
  assert written["targets"]
  for target in written["targets"]:
    assert math.isfinite(target["value"]), target
    assert target["name"] in process.stdout
  names = ("attention_time", "attention_memory", "heads_time", "heads_memory")
  for name in (*names, "sliding_window"):
    assert (tmp_path / f"{name}.png").stat().st_size > 1000


def check(section, contender):
  if section == "memory":
    assert contender["temporary_bytes"] > 0
    assert contender["resident_mib_before"] > 0
    assert contender["resident_mib_before"] <= contender["resident_mib_after"]
  elif section == "accuracy":
    assert 0 < contender["error"] < 1e-4
  else:
    assert len(contender["samples"]) == 2
    assert 0 < contender["seconds"] < math.inf
    assert 0 < contender["times_the_first"] < math.inf


def test_unknown_section_lists_the_known_ones():
  process = run("--only=nonsense")
  assert process.returncode == 2
  assert "dot, odd, small, causal" in process.stderr
