"""A compiled function of many batches; a CPU computes several at a time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from experiments.cores import num_cores
from experiments.distributed import mesh as mesh_lib

# Batches at a time need as many times the memory.
_MAX_WORKERS = 4


class Call(NamedTuple):
  """The arguments of one call, but for the parameters."""

  length: int | None  # static
  batch: Any  # NumPy arrays, sharded by rows
  rest: tuple[Any, ...] = ()  # further arrays


class BatchFunction:
  """A function of (length, params, batch, *rest), compiled for each shape.

  A batch is a tree of arrays [B, ...], where B is a multiple of the number of
  devices. Calls are compiled before they run.

  Example:
    >>> import numpy as np
    >>> from experiments.config import MeshConfig
    >>> mesh = mesh_lib.make_mesh(MeshConfig(data=1))
    >>> scaled = BatchFunction(lambda _, scale, batch: scale * batch, mesh)
    >>> calls = [Call(None, np.ones(3)), Call(None, np.ones(2))]
    >>> scaled.compile(2.0, calls)
    >>> sorted((i, result.tolist()) for i, result in scaled.run(2.0, calls))
    [(0, [2.0, 2.0, 2.0]), (1, [2.0, 2.0])]
  """

  def __init__(self, function: Callable, mesh: Mesh):
    self._mesh = mesh
    self._jitted = jax.jit(
      function, static_argnums=0, out_shardings=mesh_lib.replicated(mesh)
    )
    self._programs: dict[Any, Any] = {}

  def compile(self, params: Any, calls: Sequence[Call]) -> None:
    """Compiles all programs that the calls need, in threads."""
    new: dict[Any, Any] = {}
    for call in calls:
      case = _case(call)
      if case not in self._programs and case not in new:
        batch = mesh_lib.shard_rows(call.batch, self._mesh)
        new[case] = self._jitted.lower(call.length, params, batch, *call.rest)
    with ThreadPoolExecutor(num_cores()) as pool:
      programs = pool.map(lambda lowered: lowered.compile(), new.values())
      self._programs.update(zip(new, programs))

  def run(
    self, params: Any, calls: Sequence[Call]
  ) -> Iterator[tuple[int, Any]]:
    """Yields the index and the result, NumPy arrays, of each finished call.

    A call that raises cancels those that have not started.
    """

    def result(call: Call):
      batch = mesh_lib.shard_rows(call.batch, self._mesh)
      program = self._programs[_case(call)]
      return jax.device_get(program(params, batch, *call.rest))

    with ThreadPoolExecutor(_num_workers(self._mesh)) as pool:
      futures = {pool.submit(result, each): i for i, each in enumerate(calls)}
      try:
        for future in as_completed(futures):
          yield futures[future], future.result()
      finally:
        for future in futures:
          future.cancel()


def _case(call: Call) -> Any:
  return call.length, tuple(x.shape for x in jax.tree.leaves(call.batch))


def _num_workers(mesh: Mesh) -> int:
  """The number of batches to compute at a time."""
  # On a CPU, steps of small operations keep little more than one core busy.
  # All processes must start programs in the same order.
  is_cpu = mesh_lib.platform(mesh) == "cpu"
  alone = mesh.size == jax.process_count() == 1
  return min(num_cores(), _MAX_WORKERS) if is_cpu and alone else 1
