"""The benchmark of a device, without one."""

import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from benchmarks.devices import checks
from tests.attention.implementations.pallas.test_kernels import INTERPRETED
from tests.matrix import sampled


@sampled(
  "name",
  [*checks.SCORES, "manhattan", *checks.OPTIONS],
  default=["scaled_dot"],
)
def test_kernels_have_errors_of_rounding_only(name):
  found = list(checks.checks(INTERPRETED, names=[name], length=70))
  assert len(found) == 3
  assert all(each.passes and not each.reason for each in found), found


def test_a_wrong_result_fails_the_check(monkeypatch):
  correct = checks.attend

  def attend(*tokens, implementation, **options):
    context = correct(*tokens, implementation="reference", **options)
    return context if implementation == "reference" else 1.2 * context

  monkeypatch.setattr(checks, "attend", attend)
  found = list(checks.checks("cudnn", names=["scaled_dot"], length=7))
  assert not any(each.passes or each.reason for each in found), found


def test_what_an_implementation_does_not_serve_has_a_reason():
  found = next(iter(checks.checks("cudnn", names=["additive"], length=7)))
  assert "cannot serve this call" in found.reason
  assert found.passes


@pytest.mark.exhaustive
def test_the_program_writes_times_of_a_cpu(tmp_path):
  path = tmp_path / "devices.json"
  command = [sys.executable, "-m", "benchmarks.devices", "--quick"]
  output = subprocess.run(
    [*command, "--rounds=1", f"--json={path}"],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  assert "check: skipped: kernels need a GPU or a TPU" in output
  sections = json.loads(path.read_text())["sections"]
  assert [*sections] == ["dot", "additive"]
  entries = [entry for row in sections["dot"] for entry in row["contenders"]]
  assert {"dispatched", "jax.nn"} <= {entry["name"] for entry in entries}


def test_arrays_are_as_scores_need_them():
  gates = checks._valid(jnp.array([[0.5, -0.5]] * 2), length=2)
  assert jnp.all(gates <= 0.0)
