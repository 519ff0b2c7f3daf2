"""The bytes that instructions read, write and move between devices."""

import itertools
from collections.abc import Sequence

from experiments.aot import hlo
from experiments.aot.hlo import Sizes


def through_memory(
  program: hlo.Program, sizes: Sizes, instruction: hlo.Instruction
) -> int:
  """The bytes that an instruction reads from and writes to the memory."""
  read = _read(program, sizes, instruction)
  written = _written(program, sizes, instruction)
  return sum(each.size for each in (*read, *written) if not each.on_chip)


def moved(sizes: Sizes, instruction: hlo.Instruction) -> int:
  """The bytes of a collective's operands or results, whichever are more."""
  operands = (sizes.get(name, ()) for name in instruction.operands)
  return max(
    sum(each.size for each in _results(instruction)),
    sum(each.size for each in itertools.chain.from_iterable(operands)),
  )


def _results(instruction: hlo.Instruction) -> Sequence[hlo.Array]:
  """The results of an operation, also of one that starts a collective."""
  if not instruction.opcode.endswith("-start") or len(instruction.arrays) < 2:
    return instruction.arrays
  if instruction.opcode == "all-reduce-start":
    return instruction.arrays
  # The type is that of operands, results and contexts, which are integers.
  arrays = [
    each for each in instruction.arrays if each.shape or each.dtype != "u32"
  ]
  return arrays[len(arrays) // 2 :]


def _read(
  program: hlo.Program, sizes: Sizes, instruction
) -> Sequence[hlo.Array]:
  """What an instruction reads; a slice of an array counts as the slice."""
  opcode, read = instruction.opcode, []
  called = instruction.called("calls") if opcode == "fusion" else []
  for index, name in enumerate(instruction.operands):
    whole = sizes.get(name, ())
    if opcode in ("dynamic-slice", "slice", "gather") and index == 0:
      on_chip = all(each.on_chip for each in whole)
      read += [hlo.Array(a.size, on_chip) for a in instruction.arrays]
    elif opcode == "dynamic-update-slice" and index == 0:
      continue
    elif opcode == "copy-start":
      read += whole
    elif called and len(whole) == 1:
      part = _part(program, called[0], index)
      size = whole[0].size if part is None else min(part, whole[0].size)
      read.append(hlo.Array(size, whole[0].on_chip))
    else:
      read += whole
  return read


def _part(program: hlo.Program, name: str, index: int) -> int | None:
  """The bytes that a fusion uses of a parameter; None means all."""
  inner = program.computations.get(name, [])
  by_index = [
    each.name
    for each in inner
    if each.opcode == "parameter" and f" parameter({index})" in each.text
  ]
  used, pending = 0, by_index
  while pending:
    source = pending.pop()
    for user in inner:
      if source not in user.operands:
        continue
      position = user.operands.index(source)
      match user.opcode:
        case "bitcast":
          pending.append(user.name)
        case "dynamic-slice" | "slice" | "gather" if position == 0:
          used = max(used, user.arrays[0].size)
        case "dynamic-update-slice" if position == 0:
          continue
        case "fusion":
          part = _part(program, user.called("calls")[0], position)
          if part is None:
            return None
          used = max(used, part)
        case _:
          return None
  return used


def _written(
  program: hlo.Program, sizes: Sizes, instruction
) -> Sequence[hlo.Array]:
  """What an instruction writes; an update in place counts as the update."""
  if instruction.opcode == "dynamic-update-slice":
    return _updates(sizes, instruction)
  if instruction.opcode == "copy-start":
    return instruction.arrays[:1]
  if instruction.opcode.endswith("-start"):
    return _results(instruction)
  if instruction.opcode == "fusion" and len(instruction.arrays) == 1:
    inner = program.computations.get(instruction.called("calls")[0], [])
    by_name = {each.name: each for each in inner}
    root = next((each for each in inner if each.is_root), None)
    while root is not None and root.opcode == "bitcast":
      root = by_name.get(root.operands[0])
    if root is not None and root.opcode == "dynamic-update-slice":
      inner_sizes = {each.name: each.arrays for each in inner}
      (whole,) = instruction.arrays
      update = _updates(inner_sizes, root)
      return [hlo.Array(each.size, whole.on_chip) for each in update]
  return instruction.arrays


def _updates(sizes, instruction) -> list[hlo.Array]:
  """The update of a `dynamic-update-slice`."""
  (whole,) = instruction.arrays
  update = sizes.get(instruction.operands[1], (whole,))
  return [hlo.Array(each.size, whole.on_chip) for each in update]
