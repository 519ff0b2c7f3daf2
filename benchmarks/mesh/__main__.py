"""What sharing, saving and starting again cost.

    python -m benchmarks.mesh [--only=ring,step,save,restart] [--data=DIR]

- ring: temporaries of attention over 32,768 tokens, on one device and on each
  of eight simulated ones, as XLA plans them; the time of 8,192 tokens, on the
  same cores; and the largest error of a head, at 32,768 tokens.
- step: a training step of configs/multi30k.py's Transformer on a mesh of one
  device, against the same step without a mesh.
- save: what an asynchronous save takes of the steps, at 100 million parameters.
- restart: from the command to the first step after a checkpoint, of
  configs/multi30k.py (needs --data) with compiled code in the cache.

Each takes a minute or two; ring and restart some five.
"""

from absl import app, flags

from benchmarks.mesh import apart

_DEVICES = 8
_PARTS = ("ring", "step", "save", "restart")
_ONLY = flags.DEFINE_list("only", list(_PARTS), "What to measure.")
_DATA = flags.DEFINE_string("data", None, "The folder of Multi30k.")


@flags.validator("only", f"the parts are {', '.join(_PARTS)}")
def _known(parts) -> bool:
  return bool(parts) and set(parts) <= set(_PARTS)


def _print_ring() -> None:
  from benchmarks.mesh.ring import LENGTH, TIMED

  alone, around = (
    apart.measured("ring", devices=devices) for devices in (1, _DEVICES)
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
    print("restart: skipped; give --data=DIR, the folder of Multi30k")
    return
  for what, value in restart.measure(_DATA.value).items():
    print(f"restart to first step, {what}: {value:.2f} s")


def main(_) -> None:
  """Measures and prints."""
  if "ring" in _ONLY.value:
    _print_ring()
  for name in ("step", "save"):
    if name in _ONLY.value:
      print(name)
      for what, value in apart.measured(name).items():
        print(f"  {what:<26}{value:>14,.4g}")
  if "restart" in _ONLY.value:
    _print_restart()


if __name__ == "__main__":
  app.run(main)
