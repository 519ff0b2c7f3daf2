"""Runs attention on the GPU or TPU of this machine.

    python -m benchmarks.devices [--only=check,dot,additive] [--rounds=7]

- check: computes every score, normalizers and dropout by the Pallas kernels,
  and compares contexts and gradients with the dense formula in float32.
- dot: scaled dot products beside cuDNN, jax.nn, and PyTorch's SDPA and
  FlexAttention.
- additive: the additive score beside PyTorch, also compiled.

Tokens are bfloat16. Install JAX for the device (the extra `cuda` or `tpu`) and,
to compare with it, PyTorch. Prints tables, and writes a JSON file. The exit
code is 1 if a check fails. On CPUs --quick tries the program without kernels.
"""

import os
import pathlib
import sys

# JAX and PyTorch share the memory of a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from absl import flags
from tqdm import tqdm

from benchmarks.attention import report, settings
from benchmarks.devices import checks, tasks
from experiments import cli
from experiments.errors import UserError

_SECTIONS = ("check", "dot", "additive")
_ONLY = flags.DEFINE_list("only", list(_SECTIONS), "The sections to run.")
_LENGTHS = flags.DEFINE_list(
  "lengths", ["512", "1024", "2048", "4096", "8192", "16384"], "T = S."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 7, "Timings of each implementation, in turn.", lower_bound=1
)
_QUICK = flags.DEFINE_bool("quick", False, "Use tiny shapes, as a smoke test.")
_JSON = flags.DEFINE_string("json", "devices.json", "The file of results.")


@flags.validator("only", f"the sections are {', '.join(_SECTIONS)}")
def _known(sections) -> bool:
  return bool(sections) and set(sections) <= set(_SECTIONS)


@flags.validator("lengths", "lengths are positive numbers")
def _positive(lengths) -> bool:
  return all(each.isdigit() and int(each) > 0 for each in lengths)


def _skip(name: str, error: Exception) -> None:
  """Says why a contender has no times."""
  first = str(error).strip().partition("\n")[0]
  tqdm.write(f"without {name}: {type(error).__name__}: {first}", sys.stderr)


def _checked() -> bool:
  """Prints the checks of the kernels; whether all pass."""
  if jax.default_backend() == "cpu":
    print("check: skipped: kernels need a GPU or a TPU")
    return True
  found = list(tqdm(checks.checks("pallas"), desc="check", unit=" checks"))
  for each in found:
    result = each.reason or f"largest error {each.error:.4f}"
    sign = "" if each.passes else f"  FAILS, above {checks.LIMIT}"
    print(f"check  {each.case:<16}{each.mask:<9}{result}{sign}")
  return all(each.passes for each in found)


def main() -> None:
  """Runs the sections; prints and writes the results."""
  device = jax.devices()[0]
  if device.platform == "cpu" and not _QUICK.value:
    raise UserError(
      "JAX finds no GPU or TPU here; --quick tries the program on a CPU"
    )
  print(f"{device.device_kind}, JAX {jax.__version__}", flush=True)
  passes = _checked() if "check" in _ONLY.value else True
  lengths, tokens = [int(each) for each in _LENGTHS.value], tasks.TOKENS
  if _QUICK.value:
    lengths, tokens = [64], 64
  options = lengths, _ROUNDS.value, _skip
  jobs = {
    "dot": tasks.dot_jobs(*options, tokens),
    "additive": tasks.additive_jobs(*options),
  }
  rows = {
    name: [tasks.of_one_call(each.run()) for each in tqdm([*own], desc=name)]
    for name, own in jobs.items()
    if name in _ONLY.value
  }
  targets = tasks.dot_targets(rows.get("dot", []))
  targets += tasks.additive_targets(rows.get("additive", []))
  print("", report.table(rows), "", report.targets_table(targets), sep="\n")
  machine = settings.machine() | {"device": device.device_kind}
  path = pathlib.Path(_JSON.value)
  settings_of_run = {"rounds": _ROUNDS.value, "quick": _QUICK.value}
  report.write(path, machine, settings_of_run, rows, targets)
  print(f"\nwrote {path}")
  if not passes:
    sys.exit("error: kernels differ from the dense formula")


if __name__ == "__main__":
  cli.run(main)
