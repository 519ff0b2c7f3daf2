"""Limits of what programs compiled for accelerators need."""

import os
import subprocess
import sys

import pytest

from benchmarks.accelerators import attention_cases, report
from experiments.aot.targets import TARGETS
from experiments.errors import UserError

# Kernels of each program, at most. A TPU's copies count in programs of Pallas
# kernels.
LIMITS = {
  "h100": {
    "attention/scaled_dot/none/forward": 1,
    "attention/scaled_dot/none/gradient": 2,
    "attention/scaled_dot/none/jvp": 200,
    "attention/scaled_dot/causal/forward": 7,
    "attention/scaled_dot/padding/gradient": 10,
    "attention/general/none/gradient": 400,
    "attention/additive/none/gradient": 4000,
    "pallas/scaled_dot/none/forward": 1,
    "pallas/scaled_dot/causal/gradient": 3,
    "pallas/cosine/none/gradient": 5,
    "pallas/qk_norm/causal/gradient": 4,
    "pallas/qk_norm/none/forward": 2,
    "pallas/general/none/gradient": 4,
    "pallas/additive/none/forward": 1,
    "pallas/additive/none/gradient": 4,
    "pallas/manhattan/none/gradient": 4,
    "pallas/shaw/none/forward": 2,
    "pallas/shaw/causal/gradient": 5,
    "pallas/disentangled/none/forward": 2,
    "pallas/disentangled/none/gradient": 5,
    "pallas/scaled_dot/softpick/forward": 1,
    "pallas/scaled_dot/softpick/gradient": 3,
    "pallas/scaled_dot/sigmoid/gradient": 3,
    "pallas/scaled_dot/dropout/gradient": 3,
    "pallas/transformer_xl/padding/forward": 2,
    "pallas/transformer_xl/causal/gradient": 5,
    "pallas/location/causal/forward": 2,
    "pallas/location/causal/gradient": 6,
    "pallas/forgetting/causal/forward": 2,
    "pallas/forgetting/causal/gradient": 5,
    "pallas/local/none/forward": 1,
    "pallas/local/causal/gradient": 4,
    "pallas/scaled_dot/t5/forward": 2,
  },
  "v5e": {
    "attention/scaled_dot/none/forward": 300,
    "pallas/scaled_dot/none/forward": 1,
    "pallas/scaled_dot/causal/forward": 1,
    "pallas/scaled_dot/causal/gradient": 3,
    "pallas/general/none/forward": 1,
    "pallas/cosine/none/forward": 2,
    "pallas/cosine/none/gradient": 4,
    "pallas/additive/none/forward": 1,
    "pallas/additive/padding/gradient": 4,
    "pallas/manhattan/none/forward": 2,
    "pallas/manhattan/padding/gradient": 5,
    "pallas/temperature/padding/gradient": 5,
    "pallas/shaw/none/forward": 1,
    "pallas/shaw/causal/gradient": 3,
    "pallas/disentangled/none/gradient": 3,
    "pallas/transformer_xl/none/gradient": 3,
    "pallas/location/causal/forward": 1,
    "pallas/location/causal/gradient": 4,
    "pallas/location/padding/gradient": 5,
    "pallas/forgetting/causal/forward": 2,
    "pallas/forgetting/causal/gradient": 5,
    "pallas/forgetting/padding/gradient": 6,
    "pallas/scaled_dot/t5/gradient": 3,
    "pallas/scaled_dot/pairs/gradient": 4,
    "pallas/scaled_dot/softpick/gradient": 3,
    "pallas/scaled_dot/sigmoid/forward": 1,
    "pallas/scaled_dot/dropout/gradient": 3,
    "pallas/local/none/forward": 1,
    "pallas/local/causal/gradient": 3,
    "step/reverse/train": 2800,
  },
}
# Bytes besides arguments and results, at most.
TEMPORARIES = {
  "h100": {"forward": 2 * 2**20, "gradient": 9 * 2**20},
  "v5e": {"forward": 2**20, "gradient": 2**20, "train": 4 * 2**20},
}

# Small calls that have more than jax.nn's formula, and how many; see
# docs/accelerators.md.
EXCEPTIONS = {
  "h100": {
    "small/bfloat16/causal/512/jvp": 13,
    "small/bfloat16/padding/512/jvp": 14,
    "small/bfloat16/window/512/jvp": 13,
    "small/bfloat16/array/512/jvp": 13,
  },
  "v5e": {
    "small/float32/none/512/jvp": 7,
    "small/float32/causal/512/forward-lse": 6,
    "small/float32/causal/512/gradient-lse": 12,
    "small/float32/padding/512/gradient-lse": 13,
    "small/float32/window/512/gradient-lse": 12,
    "small/float32/array/512/gradient-lse": 12,
    "small/float32/padding/512/forward-lse": 7,
    "small/float32/window/512/forward-lse": 6,
    "small/float32/none/short/forward": 4,
    "small/float32/none/decode/forward": 5,
    "small/float32/padding/decode/forward": 6,
    "small/float32/array/decode/forward": 6,
    "small/bfloat16/causal/512/forward-lse": 6,
    "small/bfloat16/causal/512/gradient-lse": 12,
    "small/bfloat16/padding/512/gradient-lse": 13,
    "small/bfloat16/window/512/gradient-lse": 12,
    "small/bfloat16/array/512/gradient-lse": 12,
    "small/bfloat16/padding/512/forward-lse": 7,
    "small/bfloat16/window/512/forward-lse": 6,
    "small/bfloat16/causal-padding/512/forward": 5,
    "small/bfloat16/causal/short/forward": 6,
    "small/bfloat16/causal/short/gradient": 10,
    "small/bfloat16/padding/short/forward": 6,
    "small/bfloat16/padding/short/gradient": 10,
    "small/bfloat16/none/decode/forward": 5,
    "small/bfloat16/padding/decode/forward": 6,
    "small/bfloat16/array/decode/forward": 6,
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
    ],
    check=True,
    env={**os.environ, "XLA_FLAGS": ""},
  )
  return report.read(folder / f"accelerators-{target}.json")


def launched(target, results):
  """The kernels of each case; operations of XLA on a TPU without copies."""

  def count(name, cost):
    has_copies = target == "h100" or name.startswith("pallas/")
    return cost["kernels"] - (0 if has_copies else cost["copies"])

  return {
    name: count(name, cost)
    for name, cost in results.items()
    if "error" not in cost
  }


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", LIMITS)
def test_programs_stay_below_their_limits(target, tmp_path):
  limits = LIMITS[target]
  results = compiled(target, limits, tmp_path)
  kernels = launched(target, results)
  assert kernels.keys() == limits.keys()
  assert {name: n for name, n in kernels.items() if n > limits[name]} == {}
  for name, cost in results.items():
    kind, *_, derivative = name.split("/")
    if kind in ("pallas", "step"):
      assert cost["temporaries"] <= TEMPORARIES[target][derivative], name
    if kind == "pallas":
      # Each array of the forward pass is read or written twice, or six times.
      times = 2 if derivative == "forward" else 6
      assert cost["traffic"] <= times * arrays_of_forward_pass(name), name


def arrays_of_forward_pass(name):
  """The bytes of query, key, value, context and bias."""
  heads, features = attention_cases.HEADS, attention_cases.FEATURES
  if "manhattan" in name:
    heads = attention_cases.CLOSURE_HEADS
    features = attention_cases.CLOSURE_FEATURES
  length, bias = attention_cases.LENGTH, 0
  if "/pairs/" in name:
    bias = heads * length * length * 4
  return 4 * heads * length * features * 2 + bias


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize(("prefix", "count"), [("dense/", 48), ("small/", 82)])
def test_small_calls_launch_no_more_kernels_than_jax_nn(
  target, prefix, count, tmp_path
):
  kernels = launched(target, compiled(target, [prefix], tmp_path))
  calls = [name.removesuffix("/ours") for name in kernels if "/ours" in name]
  assert len(calls) == count
  more = {
    name: (kernels[f"{name}/ours"], kernels[f"{name}/jax_nn"])
    for name in calls
    if kernels[f"{name}/ours"] > kernels[f"{name}/jax_nn"]
  }
  known = EXCEPTIONS[target]
  assert {
    name: counts
    for name, counts in more.items()
    if counts[0] > known.get(name, 0)
  } == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", LIMITS)
def test_kernels_of_long_sequences_need_little_memory(target, tmp_path):
  results = compiled(target, ["long/"], tmp_path)
  count = len(attention_cases.SCORES) + len(attention_cases.OPTIONS)
  assert len(results) == 2 * count
  for name, cost in results.items():
    assert cost["temporaries"] <= 16 * 2**20, name
    tokens = 4 if name.endswith("forward") else 3 * 4
    of_manhattan = attention_cases.LONG * 64 * 2
    token = of_manhattan if "manhattan" in name else 16 * of_manhattan
    assert cost["traffic"] <= 2 * tokens * token, name
