"""Measures the cost of sharding, asynchronous saves and restarts.

    python -m benchmarks.mesh [--only=ring,step,save,restart] [--data=DIR]

- ring: attention over 32,768 tokens on one device and on eight simulated ones:
  temporary memory per device as planned by XLA, and the largest error of one
  head; the time for 8,192 tokens on the same cores.
- step: a training step of configs/multi30k.py's Transformer on a mesh of one
  device, compared with the same step without a mesh.
- save: the time that an asynchronous save of 100 million parameters adds to
  the training steps.
- restart: the time from the command to the first step after a checkpoint, for
  configs/multi30k.py with a filled compilation cache (needs --data).

step and save take one or two minutes each, ring and restart about five.
"""

from absl import flags

from benchmarks.mesh import processes
from experiments import cli

_DEVICES = 8
_NAMES = ("ring", "step", "save", "restart")
_ONLY = flags.DEFINE_list("only", list(_NAMES), "The measurements to run.")
_DATA = flags.DEFINE_string("data", None, "The directory of Multi30k.")


@flags.validator("only", f"the measurements are {', '.join(_NAMES)}")
def _known(names) -> bool:
  return bool(names) and set(names) <= set(_NAMES)


def _print_ring() -> None:
  from benchmarks.mesh.ring import LENGTH, TIMED

  alone, around = (
    processes.measure("ring", devices=devices) for devices in (1, _DEVICES)
  )
  for unit, length in (("MiB", LENGTH), ("ms", TIMED)):
    print(f"attention over 1 x 8 x {length} x 64, {unit}")
    print(f"{'':<18}{'one device':>12}{'8 devices':>12}{'ratio':>8}")
    for name, case in around.items():
      one, each = alone[name][unit], case[unit]
      print(f"{name:<18}{one:>12,.1f}{each:>12,.1f}{each / one:>8.2f}")
  print(f"largest errors over 1 x 1 x {LENGTH} x 64")
  for name, case in around.items():
    print(f"{name:<18}{case['error']:>12.1e}")


def _print_restart() -> None:
  from benchmarks.mesh import restart

  if not _DATA.value:
    print("restart: skipped; give --data=DIR, the directory of Multi30k")
    return
  for what, value in restart.measure(_DATA.value).items():
    print(f"restart to first step, {what}: {value:.2f} s")


def main() -> None:
  """Runs the measurements and prints them."""
  if "ring" in _ONLY.value:
    _print_ring()
  for name in ("step", "save"):
    if name in _ONLY.value:
      print(name)
      for what, value in processes.measure(name).items():
        print(f"  {what:<26}{value:>14,.4g}")
  if "restart" in _ONLY.value:
    _print_restart()


if __name__ == "__main__":
  cli.run(main)
