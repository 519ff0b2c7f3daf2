r"""Compiles a training step for accelerators and says what it needs there.

    pip install -e '.[experiments,aot-tpu,aot-cuda]'
    python -m experiments.plan --config=configs/translation.py \
        --topology=v5e:4x4 --config.mesh.fsdp=4 --config.train.batch_size=65536

Prints, for a batch of each length, whether the step fits the memory of a
device, which collectives move how many bytes, and an estimate of its time. The
estimate is the compiler's for TPUs. For GPUs it is, for each kernel, the longer
of its memory traffic at full bandwidth and its matrix products at full speed,
plus 2 microseconds: a lower bound for most steps, without other arithmetic. The
accelerators, the data and a run directory are not needed, and nothing is run:
vocabularies are as large as the config allows, and batches of text have one
length. Where batches do not divide over the devices, the plan is that of the
next larger batches, and names the flag that a run needs. Topologies are those
of JAX, such as v5e:16x16; h100:1x1x8 means 8 GPUs.
"""

import os

from absl import flags

from experiments import cli
from experiments.config import TaskConfig, parse
from experiments.errors import UserError

_CONFIG = cli.define_config()
_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "The accelerators, such as v5e:16x16; for GPUs slices x machines x GPUs, such"
  " as h100:1x1x8.",
  required=True,
)
_LENGTHS = flags.DEFINE_list(
  "lengths",
  [],
  "Numbers of source and target tokens in batches of text; by default 32 and"
  " config.data.max_length.",
)


def main() -> int:
  """Prints the plan; 1 if a step does not fit."""
  config = parse(_CONFIG.value.to_dict())
  lengths = _lengths(config)
  # The compilers are used, but no device is.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from experiments.aot import plan
  from experiments.aot.targets import target_of

  target = target_of(_TOPOLOGY.value)
  fits = True
  for step in plan.steps(config, target, _TOPOLOGY.value, lengths):
    print(plan.describe(step, target), flush=True)
    fits = fits and step.fits(target)
  return 0 if fits else 1


def _lengths(config) -> list[int | None]:
  """The lengths of batches; None for a task."""
  if isinstance(config.data, TaskConfig):
    if _LENGTHS.value:
      raise UserError("--lengths: the config has a task, not text")
    return [None]
  longest = config.data.max_length
  try:
    given = [int(length) for length in _LENGTHS.value]
  except ValueError:
    raise UserError(f"--lengths={_LENGTHS.value}: must be numbers") from None
  for length in given:
    if not 2 <= length <= longest:
      raise UserError(
        f"--lengths: {length} must be between 2 and config.data.max_length,"
        f" {longest}"
      )
  return [*(given or sorted({min(32, longest), longest}))]


if __name__ == "__main__":
  cli.run(main, needs_config=True)
