"""The cost of a compiled program on its target, as its compiler reports it.

Nothing here is a measurement: kernels are counted in the program, bytes are the
sizes of what kernels read and write, and seconds are estimates.
"""

import collections
import contextlib
import dataclasses
import pathlib
import re
import tempfile
import time
from typing import Any, NamedTuple

import jax

from experiments.aot import hlo, products, traffic
from experiments.aot.targets import Target

# Instructions that launch no kernel of their own.
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
  "after-all", "partition-id", "replica-id", "while", "conditional", "call",
  "opt-barrier", "add-dependency",
}  # fmt: skip
# The ends and intermediate steps of asynchronous operations.
_ENDS = re.compile(r".*-(done|update)$")
# Instructions that copy arrays without computing. XLA starts many of a TPU's
# ahead of the operation that reads the copy.
_COPIES = {"copy", "copy-start", "slice", "slice-start"}
_JOINED_COPIES = 'custom_call_target="ConcatBitcast"'
_COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "collective-broadcast",
)
# A ring sums the parts of arrays and then gathers the sums.
_REPEATS = {"all-reduce": 2}
_LAUNCH = 2e-6  # seconds between kernels of a GPU
# XLA needs a GPU to choose among kernels by measuring them.
_GPU_OPTIONS = {"xla_gpu_autotune_level": "0"}


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of a program on each device."""

  kernels: int  # that a GPU launches; fused operations of a TPU
  copies: int  # of `kernels`, those that copy arrays without computing
  traffic: int  # bytes that kernels read from and write to the memory
  temporaries: int  # bytes of memory besides arguments and results
  arguments: int  # bytes
  results: int  # bytes that do not replace an argument
  # Calls and bytes, by name: those of the operands or of the results of a
  # device, whichever are more.
  collectives: dict[str, tuple[int, int]]
  # The estimate: on TPUs the compiler's cycles; on GPUs, for each kernel, the
  # longer of its traffic at full bandwidth and its matrix products at full
  # speed, and 2 microseconds. Collectives are added: their bytes, twice those
  # of an all-reduce, at the bandwidth of a device's interconnect, or of the
  # network if a collective joins machines.
  seconds: float
  compile_seconds: float  # on the compiling machine
  operations: float = 0.0  # of products, see `products`; counted for GPUs only

  @property
  def memory(self) -> int:
    """The bytes of a device's memory that the program needs."""
    return self.arguments + self.results + self.temporaries


def compiled(
  function: Any,  # which may be the result of `jax.jit`
  *specs: Any,  # trees of `jax.ShapeDtypeStruct`, sharded over the target
  target: Target,
  options: dict[str, str | bool] | None = None,  # of XLA
) -> tuple[Any, float]:
  """The `jax.stages.Compiled`, and the seconds of tracing and compilation."""
  begin = time.perf_counter()
  jitted = function if hasattr(function, "lower") else jax.jit(function)
  given: dict[str, str | bool]
  given = {} if target.platform == "tpu" else dict(_GPU_OPTIONS)
  given |= options or {}
  mesh = jax.tree.leaves(specs)[0].sharding.mesh
  with jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext():
    lowered = jitted.lower(*specs)
    program = lowered.compile(compiler_options=given or None)
    seconds = time.perf_counter() - begin
    try:
      program.as_text()
    except jax.errors.JaxRuntimeError:
      program = _with_dumped_text(lowered, given)
  return program, seconds


class _Dumped(NamedTuple):
  """A program, and its text as its compiler wrote it to a file."""

  program: Any
  text: str

  def as_text(self) -> str:
    return self.text

  def memory_analysis(self) -> Any:
    return self.program.memory_analysis()


def _with_dumped_text(lowered: Any, options: dict[str, Any]) -> _Dumped:
  """The program, whose text JAX cannot read, compiled once more."""
  # JAX's XLA does not know some asynchronous operations of libtpu's.
  with tempfile.TemporaryDirectory() as folder:
    dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    program = lowered.compile(compiler_options=options | dump)
    paths = pathlib.Path(folder).glob("*.after_codegen.txt")
    texts = [path.read_text() for path in paths]
  # Programs that the compiler makes beside it are smaller.
  return _Dumped(program, max(texts, key=len))


def cost_of(
  program: Any,
  seconds: float,  # of its compilation
  *,
  target: Target,
  machine: int | None = None,  # its devices; None if no network joins machines
) -> Cost:
  """The cost of a program that `compiled` has returned."""
  parsed = hlo.parse(program.as_text())
  sizes = parsed.results()
  kernels = copies = traffic_bytes = 0
  operations = estimate = 0.0
  calls, moved = collections.Counter[str](), collections.Counter[str]()
  for _, instruction, times in parsed.executed():
    if instruction.opcode in _FREE or _ENDS.match(instruction.opcode):
      continue
    kernels += times
    copies += times * _is_copy(instruction)
    size = traffic.through_memory(parsed, sizes, instruction)
    traffic_bytes += times * size
    count = 0.0
    if not target.clock:
      count = products.operations(parsed, sizes, instruction)
    operations += times * count
    estimate += _seconds(instruction, times, size, count, target)
    if name := _collective(instruction):
      calls[name] += times
      size = traffic.moved(sizes, instruction)
      moved[name] += times * size
      sent = size * _REPEATS.get(name, 1)
      estimate += times * sent / _speed(instruction, target, machine)
  memory = program.memory_analysis()
  return Cost(
    kernels,
    copies,
    traffic_bytes,
    memory.temp_size_in_bytes,
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes - memory.alias_size_in_bytes,
    {name: (calls[name], moved[name]) for name in calls},
    estimate,
    seconds,
    operations,
  )


def _seconds(
  instruction: hlo.Instruction,
  times: int,
  size: int,
  operations: float,
  target: Target,
) -> float:
  """The time of a kernel that moves so many bytes, and runs so many times."""
  if target.clock:
    cycles = instruction.number(r'"estimated_cycles":"(\d+)"') or 0
    return times * cycles / target.clock
  longest = max(size / target.bandwidth, operations / target.flops)
  return times * (longest + _LAUNCH)


def _is_copy(instruction: hlo.Instruction) -> bool:
  """Whether an operation copies an array, or joins what copies have written."""
  return instruction.opcode in _COPIES or _JOINED_COPIES in instruction.text


def _collective(instruction: hlo.Instruction) -> str | None:
  """The name of a collective operation, also of an asynchronous one."""
  name = instruction.opcode.removesuffix("-start")
  return name if name in _COLLECTIVES else None


def _speed(
  instruction: hlo.Instruction, target: Target, machine: int | None
) -> float:
  """The bytes per second that a collective moves to a device."""
  groups = instruction.groups()  # none: all devices, of all machines
  is_local = machine is None or (
    groups and all(len({n // machine for n in each}) == 1 for each in groups)
  )
  return target.interconnect if is_local else target.network
