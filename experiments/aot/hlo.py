"""Reads the text of compiled programs: instructions, loops, array sizes.

The text is that of `jax.stages.Compiled.as_text`. XLA has no Python interface
to compiled programs of a device that is not there.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_BITS = {
  "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8,
  "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32,
  "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
  "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
_NO_LIMIT = 2**31 - 1  # the largest int32, from minima of positions
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*\w*)\[([0-9,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
  """An array in the type of an instruction."""

  size: int  # bytes
  on_chip: bool  # whether it is in a TPU's on-chip memory
  dtype: str = ""  # unknown of a part of an array, as its shape
  shape: tuple[int, ...] = ()


Sizes = Mapping[str, Sequence[Array]]  # the results of instructions, by name


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of a computation."""

  name: str
  opcode: str
  arrays: tuple[Array, ...]  # results
  operands: tuple[str, ...]  # names
  text: str  # the whole line

  @property
  def is_root(self) -> bool:
    """Whether it is the result of its computation."""
    return self.text.lstrip().startswith("ROOT ")

  def called(self, *attributes: str) -> list[str]:
    """The computations that attributes such as `body` name."""
    found = []
    for attribute in attributes:
      match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.text)
      if match:
        found += re.findall(r"%?([\w.\-]+)", match[1])
    return found

  def numbers(self, attribute: str) -> list[int]:
    """The numbers of an attribute such as `lhs_contracting_dims={1}`."""
    pattern = rf'\b{attribute}"?[=:]\s*[{{\[]([^}}\]]*)[}}\]]'
    match = re.search(pattern, self.text)
    return [int(each) for each in re.findall(r"\d+", match[1] if match else "")]

  def groups(self) -> list[list[int]]:
    """The devices that a collective joins; none if it joins all."""
    pairs = r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}"
    if listed := re.search(pairs, self.text):
      groups = re.findall(r"\{([\d,]*)\}", listed[1])
      return [*map(_numbers, filter(None, groups))]
    counted = re.search(
      r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.text
    )
    if not counted:
      return []
    shape, whole = (_numbers(counted[place]) for place in (1, 2))
    devices = np.arange(math.prod(whole)).reshape(whole)
    if counted[3]:
      devices = devices.transpose(_numbers(counted[3]))
    return devices.reshape(shape).tolist()

  def number(self, pattern: str) -> int | None:
    """The first number that a pattern with one group finds in the line."""
    match = re.search(pattern, self.text)
    return int(match[1]) if match else None


def _numbers(text: str) -> list[int]:
  return [int(each) for each in text.split(",")]


@dataclasses.dataclass(frozen=True)
class Program:
  """The computations of a program, by name."""

  computations: dict[str, list[Instruction]]
  entry: str

  def results(self) -> dict[str, tuple[Array, ...]]:
    """The results of all instructions, by the names of these."""
    instructions = itertools.chain.from_iterable(self.computations.values())
    return {each.name: each.arrays for each in instructions}

  def executed(self) -> Iterator[tuple[str, Instruction, int]]:
    """Computation, instruction and how often it runs; no fusion is entered."""
    # Loops run as often as their known number, or the constant of their
    # condition; of the branches of a conditional, the longest runs.
    yield from self._executed(self.entry, 1)

  def _executed(self, name: str, times: int):
    for instruction in self.computations.get(name, ()):
      yield name, instruction, times
      match instruction.opcode:
        case "while":
          (body,) = instruction.called("body")
          yield from self._executed(body, times * self.trips(instruction))
        case "conditional":
          branches = instruction.called(
            "branch_computations", "true_computation", "false_computation"
          )
          runs = [list(self._executed(branch, times)) for branch in branches]
          yield from max(runs, key=lambda run: sum(n for *_, n in run))
        case "call" | "async-start":
          for inner in instruction.called("to_apply", "calls"):
            yield from self._executed(inner, times)

  def trips(self, loop: Instruction) -> int:
    """The number of iterations, 1 if unknown; a limit for searches."""
    known = loop.number(r"known_trip_count\D*(\d+)")
    if known is not None:
      return known
    (condition,) = loop.called("condition")
    return max(self._constants(condition), default=1)

  def _constants(self, name: str, depth: int = 0) -> Iterator[int]:
    for instruction in self.computations.get(name, ()):
      value = instruction.number(r"s32\[\]\S* constant\((\d+)\)")
      if value is not None and value != _NO_LIMIT:
        yield value
      if depth < 2:
        for inner in instruction.called("calls"):
          yield from self._constants(inner, depth + 1)


def parse(text: str) -> Program:
  """Parses the text of a compiled program."""
  computations: dict[str, list[Instruction]] = {}
  entry, current = "", None
  for line in _joined(text):
    if start := _COMPUTATION.match(line):
      current = computations.setdefault(start[2], [])
      entry = start[2] if start[1] else entry
    elif _END.match(line):
      current = None
    elif current is not None:
      current += _instructions(line)
  return Program(computations, entry)


def _joined(text: str) -> Iterator[str]:
  """The lines; one for an instruction with line breaks in its attributes."""
  line = ""
  for each in text.splitlines():
    if any(start.match(each) for start in (_COMPUTATION, _INSTRUCTION, _END)):
      yield line
      line = each
    else:
      line += each
  yield line


def _instructions(line: str) -> Iterator[Instruction]:
  """The instruction of a line `name = type opcode(operands), attributes`."""
  if not (found := _INSTRUCTION.match(line)):
    return
  name, rest = found.groups()
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
  match = re.match(r" ?([\w\-]+)\(", rest[end:])
  if not match:
    return
  opening = end + match.end() - 1
  operands = rest[opening : _closing(rest, opening)]
  yield Instruction(
    name,
    match[1],
    arrays(rest[:end]),
    tuple(_NAME.findall(operands)),
    line,
  )


def arrays(text: str) -> tuple[Array, ...]:
  """The arrays of a type."""
  found = []
  for dtype, sizes, layout in _ARRAY.findall(text):
    if dtype in _BITS:
      shape = tuple(int(size) for size in sizes.split(",") if size)
      size = -(-math.prod(shape) * _BITS[dtype] // 8)
      found.append(Array(size, "S(1)" in layout, dtype, shape))
  return tuple(found)


def _closing(text: str, opening: int) -> int:
  """The index of the parenthesis that closes the one at `opening`."""
  depth = 0
  for index in range(opening, len(text)):
    depth += {"(": 1, ")": -1}.get(text[index], 0)
    if not depth:
      return index
  return len(text)
