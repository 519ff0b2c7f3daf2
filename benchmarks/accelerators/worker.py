"""Compiles cases in another process, because compilers crash and hang."""

import dataclasses
import multiprocessing
import os
import traceback
from typing import Any

from benchmarks.accelerators import cases

# A compiler keeps memory: after this many cases a new process starts.
_CASES_PER_PROCESS = 60


class Worker:
  """Compiles cases for a target, one after another."""

  def __init__(self, target: str):
    self._target = target
    self._process: Any = None
    self._count = 0

  def compile(self, name: str, seconds: float) -> dict[str, Any]:
    """The fields of the case's cost, or its `error`."""
    if self._count == _CASES_PER_PROCESS:
      self.close()
    if self._process is None:
      self._start()
    self._count += 1
    try:
      self._connection.send(name)
      if not self._connection.poll(seconds):
        self.close()
        return {"error": f"took more than {seconds:.0f} s"}
      return self._connection.recv()
    except (EOFError, OSError):
      self._process.join()
      code = self._process.exitcode
      self.close()
      return {"error": f"the compiler ended the process with code {code}"}

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.kill()
      self._process.join()
      self._process = None
    self._count = 0

  def _start(self) -> None:
    context = multiprocessing.get_context("spawn")
    self._connection, other = context.Pipe()
    self._process = context.Process(
      target=_serve, args=(other, self._target), daemon=True
    )
    self._process.start()
    other.close()


def compile_case(case: cases.Case, target: Any) -> dict[str, Any]:
  """The fields of the case's cost, or its `error`."""
  from experiments.aot.cost import compiled, cost_of

  try:
    function, specs = case.make(target)
    program, seconds = compiled(function, *specs, target=target)
    return dataclasses.asdict(cost_of(program, seconds, target=target))
  except Exception as error:  # recorded, and the next case follows
    if os.environ.get("ACCELERATORS_TRACEBACK"):
      traceback.print_exc()
    lines = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0][:300]}"}


def _serve(connection: Any, target_name: str) -> None:
  """Compiles the cases whose names arrive until the connection closes."""
  from experiments.aot.targets import TARGETS

  target = TARGETS[target_name]
  known = cases.all_cases()
  while True:
    try:
      name = connection.recv()
    except EOFError:
      return
    connection.send(compile_case(known[name], target))
