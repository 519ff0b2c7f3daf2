"""The benchmark that compiles for accelerators."""

import json
import pathlib

import jax
import pytest

from benchmarks.accelerators import attention_cases, cases, report, worker
from experiments.aot.targets import TARGETS

DOCS = pathlib.Path(__file__).parents[2] / "docs"

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
  with pytest.raises(ValueError, match="no case starts with 'attention/dto'"):
    cases.selected(known, [prefix, "attention/dto"], full=False)


def test_layouts_and_splash_attention_are_for_tpus_only():
  known = cases.all_cases()
  names = ["layout/4x4/data", "peers/splash/none/forward"]
  general = ["peers/jax_nn/none/forward"]
  on_gpu, on_tpu = (
    cases.for_target(known, [*names, *general], TARGETS[target])
    for target in ("h100", "v5e")
  )
  assert on_gpu == general
  assert on_tpu == [*names, *general]


def test_results_are_read_back(tmp_path):
  path = tmp_path / "accelerators-v5e.json"
  assert report.read(path) == {}
  report.write(path, "v5e", {"a": COST, "b": {"error": "died"}})
  results = report.read(path)
  assert results["a"]["kernels"] == 1234
  assert json.loads(path.read_text())["title"] == "compiled, not run"


def test_the_document_has_the_table_of_the_stored_costs():
  stored = {
    target: report.read(DOCS / "results" / f"accelerators-{target}.json")
    for target in TARGETS
  }
  document = (DOCS / "compiled_programs.md").read_text()
  assert f"\n{report.tables(stored)}\n" in document


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
