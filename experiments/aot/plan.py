"""What a training step needs on accelerators, from its compiled program."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from experiments.aot import abstract
from experiments.aot.cost import Cost, compiled, cost_of
from experiments.aot.targets import GPU_SHARE, Target, machine_size
from experiments.config import Config
from experiments.data.batch import BatchShape
from experiments.distributed import mesh as mesh_lib


class Step(NamedTuple):
  """The cost of a training step on each device."""

  shape: BatchShape
  devices: int
  cost: Cost | str  # why it does not fit, if the compiler refuses it
  flag: str | None = None  # that the config needs for these devices

  def fits(self, target: Target) -> bool:
    """Whether a device has enough memory."""
    return not isinstance(self.cost, str) and (
      self.cost.memory <= target.memory
    )


def with_whole_rows(config: Config, shards: int) -> tuple[Config, str | None]:
  """A config whose batches divide over shards, and the flag that it needs."""
  train, name = config.train, config.train.rows_field
  needed = shards * train.accumulation
  size = getattr(train, name)
  if size % needed == 0:
    return config, None
  size += -size % needed
  train = train.model_copy(update={name: size})
  changed = config.model_copy(update={"train": train})
  return changed, f"--config.train.{name}={size}"


def steps(
  config: Config,
  target: Target,
  topology: str,
  lengths: Sequence[int | None],
) -> Iterator[Step]:
  """Compiles the step of a config for batches of each length."""
  devices = target.devices(topology)
  mesh = mesh_lib.make_mesh(config.mesh, devices)
  config, flag = with_whole_rows(config, mesh_lib.num_batch_shards(mesh))
  experiment = abstract.abstract_experiment(config, devices)
  machine = machine_size(topology)
  for length in lengths:
    shape = abstract.batch_shape(config, length)
    function, specs = abstract.train_step(experiment, shape)
    cost: Cost | str
    try:
      with jax.set_mesh(mesh):  # names the platform, as in a run
        program, seconds = compiled(function, *specs, target=target)
      cost = cost_of(program, seconds, target=target, machine=machine)
    except jax.errors.JaxRuntimeError as error:
      cost = _excess(str(error))
      if not cost:
        raise
    yield Step(shape, mesh.size, cost, flag)


def _excess(error: str) -> str:
  """What the compiler says of too little memory; empty for other errors."""
  # TPUs: "... Ran out of memory on HBM, the total memory required for HLO
  # temporaries (115G) exceeds available HBM (15.75G). HLO module: ..."
  found = re.search(r"RESOURCE_EXHAUSTED: (.*\bhbm\b.*)", error, re.IGNORECASE)
  text = found[1].rpartition("Ran out of memory on HBM, ")[2] if found else ""
  return text.partition(". HLO module")[0]


def describe(step: Step, target: Target) -> str:
  """Lines that say whether a step fits, what it moves, and the estimate."""
  cost, (rows, source, target_length) = step.cost, step.shape
  needed = f" (with {step.flag})" if step.flag else ""
  fits = "fits" if step.fits(target) else "DOES NOT FIT"
  batch = (
    f"{rows} x ({source} + {target_length}) tokens on {step.devices} x"
    f" {target.name}{needed}"
  )
  if isinstance(cost, str):
    return f"{batch}:\n  memory of a device: {fits}: {cost}"
  lines = [
    f"{batch}, compiled in {cost.compile_seconds:.0f} s:",
    f"  memory of a device: {_gibibytes(cost.memory)} of"
    f" {_gibibytes(target.memory)}, {fits}{_hint(step, target)} (state"
    f" and batch {_gibibytes(cost.arguments)}, temporaries"
    f" {_gibibytes(cost.temporaries)})",
  ]
  for name, (count, size) in sorted(cost.collectives.items()):
    lines.append(f"  {count} x {name}: {size / 2**20:,.1f} MiB per device")
  if not cost.collectives:
    lines.append("  no collectives")
  lines += [
    f"  {cost.kernels:,} kernels, {_gibibytes(cost.traffic)} through memory",
    f"  estimate {1e3 * cost.seconds:.1f} ms (compiled, not run):"
    f" {_basis(cost, target)}",
  ]
  return "\n".join(lines)


def _hint(step: Step, target: Target) -> str:
  """How a GPU offers enough memory for a step that does not fit, if it can."""
  if target.platform == "tpu" or isinstance(step.cost, str):
    return ""
  if not target.memory < step.cost.memory <= target.memory / GPU_SHARE:
    return ""
  return (
    f" unless XLA_PYTHON_CLIENT_MEM_FRACTION exceeds its default of {GPU_SHARE}"
  )


def _basis(cost: Cost, target: Target) -> str:
  """What the estimate is made of."""
  moved = " and collectives" if cost.collectives else ""
  if target.clock:
    return f"the compiler's cycles{moved}"
  return (
    "for each kernel the longer of memory traffic at"
    f" {target.bandwidth / 1e12:.2f} TB/s and matrix products at"
    f" {target.flops / 1e12:.0f} TFLOP/s (as long as"
    f" {cost.operations / 1e12:.2f} TFLOP in bfloat16), plus 2"
    f" microseconds{moved}; kernels rarely reach either"
  )


def _gibibytes(size: float) -> str:
  return f"{size / 2**30:.2f} GiB"
