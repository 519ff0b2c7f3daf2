"""Functions of many batches, of which a CPU computes several at a time."""

import threading

import numpy as np
import pytest

from experiments.config import MeshConfig
from experiments.cores import num_cores
from experiments.decoding import batch_function
from experiments.decoding.batch_function import BatchFunction, Call
from experiments.distributed import mesh as mesh_lib

CALLS = [Call(length, np.full(4, length), (3.0,)) for length in range(20)]


def compiled(devices=1):
  function = BatchFunction(
    lambda length, params, batch, offset: length + params * batch + offset,
    mesh_lib.make_mesh(MeshConfig(data=devices)),
  )
  function.compile(2.0, CALLS)
  return function


@pytest.mark.parametrize("workers", [1, 4])
def test_each_result_is_that_of_its_call(monkeypatch, workers):
  monkeypatch.setattr(batch_function, "_num_workers", lambda mesh: workers)
  results = dict(compiled().run(2.0, CALLS))
  assert sorted(results) == [*range(20)]
  for length, result in results.items():
    np.testing.assert_array_equal(result, np.full(4, 3 * length + 3.0))


def test_a_failed_call_ends_the_others(monkeypatch):
  monkeypatch.setattr(batch_function, "_num_workers", lambda mesh: 2)
  function, started, proceed = compiled(), [], threading.Event()

  def fail(tree, mesh):
    started.append(None)
    if len(started) > 1:
      proceed.wait()
    raise RuntimeError("no memory")

  monkeypatch.setattr(mesh_lib, "shard_rows", fail)
  timer = threading.Timer(0.1, proceed.set)
  timer.start()
  with pytest.raises(RuntimeError, match="no memory"):
    list(function.run(2.0, CALLS))
  assert len(started) <= 3


def test_calls_that_nobody_waits_for_do_not_start(monkeypatch):
  monkeypatch.setattr(batch_function, "_num_workers", lambda mesh: 1)
  function, started, proceed = compiled(), [], threading.Event()
  shard_rows = mesh_lib.shard_rows

  def slow(tree, mesh):
    started.append(None)
    if len(started) > 1:
      proceed.wait()
    return shard_rows(tree, mesh)

  monkeypatch.setattr(mesh_lib, "shard_rows", slow)
  results = function.run(2.0, CALLS)
  next(results)
  threading.Timer(0.1, proceed.set).start()
  results.close()
  assert len(started) <= 2


def test_devices_are_not_shared_by_workers():
  several = mesh_lib.make_mesh(MeshConfig(data=2))
  alone = mesh_lib.make_mesh(MeshConfig(data=1))
  assert batch_function._num_workers(several) == 1
  cores = min(num_cores(), 4)
  assert batch_function._num_workers(alone) == cores >= 1
