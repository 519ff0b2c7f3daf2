"""The benchmark that compiles for accelerators, and limits of its figures."""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks.accelerators import attention_cases, cases, report, worker
from experiments.aot.targets import TARGETS
from experiments.errors import UserError

COST = {
  "kernels": 1234,
  "copies": 34,
  "traffic": 3 * 2**20,
  "temporaries": 2**24,
  "arguments": 1,
  "results": 1,
  "collectives": {"all-reduce": (2, 2**20)},
  "seconds": 0.0015,
  "compile_seconds": 2.0,
}


def test_a_failure_is_recorded():
  def fail(target):
    raise ValueError("no such shape\nand more")

  case = cases.Case("a/b", fail)
  assert worker.compile_case(case, None) == {
    "error": "ValueError: no such shape"
  }


def test_the_default_subset_is_smaller_and_prefixes_select():
  known = cases.all_cases()
  some = cases.selected(known, [], full=False)
  everything = cases.selected(known, [], full=True)
  assert 0 < len(some) < len(everything) == len(known)
  prefix = "attention/dot/"
  assert set(cases.selected(known, [prefix], full=False)) == {
    name for name in known if name.startswith(prefix)
  }


def test_results_are_read_back(tmp_path):
  path = tmp_path / "accelerators-v5e.json"
  assert report.read(path) == {}
  report.write(path, "v5e", {"a": COST, "b": {"error": "died"}})
  results = report.read(path)
  assert results["a"]["kernels"] == 1234
  assert json.loads(path.read_text())["title"] == "compiled, not run"


def test_the_table_replaces_what_is_between_the_markers(tmp_path):
  results = {"v5e": {"a": COST, "b": {"error": "ValueError: no"}}, "h100": {}}
  path = tmp_path / "page.md"
  path.write_text(f"before\n{report._BEGIN}\nold\n{report._END}\nafter\n")
  report.write_document(path, report.tables(results))
  text = path.read_text()
  assert text.startswith("before\n")
  assert text.endswith("after\n")
  assert "old" not in text
  assert "| a | 1,234 | 3.0 | 16 | 1.5 | 2 |" in text
  assert "| b | ValueError |" in text
  assert "| a | 2 all-reduce (1.0 MiB) |  |" in text


@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_pallas_kernels_have_no_estimate(target):
  for name in ("pallas/dot", "long/dot"):
    assert "| 16 |  | 2 |" in report.tables({target: {name: COST}})


def test_every_case_has_a_line():
  assert "2 all-reduce (1.0 MiB)" in report.line("a", COST)
  assert report.line("a", {"error": "died"}) == "a: died"


class Here:
  """A target with the devices of this machine."""

  platform = "cpu"

  def devices(self, topology=None):
    return jax.devices()[:1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("score", [*attention_cases.SCORES, "manhattan"])
@pytest.mark.parametrize("derivative", attention_cases.DERIVATIVES)
def test_cases_of_attention_can_be_traced(score, derivative):
  function, specs = attention_cases._make(score, "causal", derivative, Here())
  assert jax.tree.leaves(jax.eval_shape(function, *specs))


# Kernels of each program, at most; operations of a TPU without copies.
LIMITS = {
  "h100": {
    "attention/scaled_dot/none/forward": 1,
    "attention/scaled_dot/none/gradient": 3,
    "attention/scaled_dot/none/jvp": 200,
    "attention/scaled_dot/causal/forward": 7,
    "attention/scaled_dot/padding/gradient": 10,
    "attention/general/none/gradient": 400,
    "attention/additive/none/gradient": 4000,
    "pallas/scaled_dot/none/forward": 1,
    "pallas/scaled_dot/causal/gradient": 4,
    "pallas/cosine/none/gradient": 6,
    "pallas/qk_norm/causal/gradient": 5,
    "pallas/additive/none/forward": 1,
    "pallas/additive/none/gradient": 5,
  },
  "v5e": {
    "attention/scaled_dot/none/forward": 300,
    "pallas/scaled_dot/none/forward": 1,
    "pallas/scaled_dot/causal/forward": 1,
    # With the ones of the benchmark's sum.
    "pallas/scaled_dot/causal/gradient": 4,
    "pallas/general/none/forward": 1,
    "pallas/cosine/none/forward": 1,
    "pallas/cosine/none/gradient": 4,
    "pallas/additive/none/forward": 1,
    "pallas/additive/none/gradient": 4,
    "pallas/manhattan/none/gradient": 4,
  },
}


def compiled(target, prefixes, folder):
  """The figures of the cases with these prefixes."""
  try:
    TARGETS[target].check_installed()
  except UserError as error:
    pytest.skip(str(error))
  subprocess.run(
    [
      *(sys.executable, "-m", "benchmarks.accelerators"),
      f"--target={target}",
      f"--only={','.join(prefixes)}",
      f"--json={folder}",
      "--document=",
    ],
    check=True,
    env={**os.environ, "XLA_FLAGS": ""},
  )
  return report.read(folder / f"accelerators-{target}.json")


def launched(target, results):
  """The kernels of each case; operations of a TPU without copies."""
  return {
    name: cost["kernels"] - (cost["copies"] if target == "v5e" else 0)
    for name, cost in results.items()
    if "error" not in cost
  }


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", LIMITS)
def test_kernels_stay_below_their_limits(target, tmp_path):
  limits = LIMITS[target]
  kernels = launched(target, compiled(target, limits, tmp_path))
  assert kernels.keys() == limits.keys()
  assert {name: n for name, n in kernels.items() if n > limits[name]} == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", LIMITS)
def test_small_calls_launch_no_more_kernels_than_jax_nn(target, tmp_path):
  kernels = launched(target, compiled(target, ["dense/"], tmp_path))
  calls = [name.removesuffix("/ours") for name in kernels if "/ours" in name]
  assert len(calls) == 48
  assert [
    (name, kernels[f"{name}/ours"], kernels[f"{name}/jax_nn"])
    for name in calls
    if kernels[f"{name}/ours"] > kernels[f"{name}/jax_nn"]
  ] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", LIMITS)
def test_kernels_of_long_sequences_need_little_memory(target, tmp_path):
  results = compiled(target, ["long/"], tmp_path)
  assert len(results) == 2 * len(attention_cases._OF_KERNELS)
  for name, cost in results.items():
    assert cost["temporaries"] <= 16 * 2**20, name
    tokens = 4 if name.endswith("forward") else 3 * 4
    of_manhattan = attention_cases.LONG * 64 * 2
    token = of_manhattan if "manhattan" in name else 16 * of_manhattan
    assert cost["traffic"] <= 2 * tokens * token, name
