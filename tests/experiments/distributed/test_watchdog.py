"""The watchdog with an injected clock, and the message of an abort."""

import subprocess
import sys

import pytest

from experiments.distributed.watchdog import Watchdog
from tests.experiments import processes


class Service:
  """The key-value store of JAX's coordination service."""

  def __init__(self):
    self.values = {}

  def key_value_set(self, key, value, allow_overwrite):
    assert allow_overwrite
    self.values[key] = value

  def key_value_dir_get(self, prefix):
    return [
      (key, value)
      for key, value in self.values.items()
      if key.startswith(prefix)
    ]


class Clock:
  now = 1000.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def crew(clock):
  service = Service()
  return [
    Watchdog(service, index, 3, stall_seconds=100, clock=clock)
    for index in range(3)
  ]


def run(clock, crew, seconds):
  for _ in range(seconds):
    clock.now += 1
    for each in crew:
      each.exchange()


def test_progress_is_not_a_stall(clock, crew):
  for step in range(50):
    for each in crew:
      each.step = step
    run(clock, crew, 5)
    assert all(each.stall() is None for each in crew)


def test_a_stall_names_the_process_at_the_first_step(clock, crew):
  for each, step in zip(crew, (9, 8, 9)):
    each.step = step
  run(clock, crew, 99)
  assert crew[0].stall() is None
  run(clock, crew, 3)
  for each in crew:
    message = each.stall()
    assert message.startswith("step 8 has not ended for 10"), message
    assert message.endswith("in process 1; other processes are at step 9")


def test_a_stall_names_all_processes_at_the_first_step(clock, crew):
  for each, step in zip(crew, (8, 9, 8)):
    each.step = step
  run(clock, crew, 102)
  assert "in process 0, 2; other processes are at step 9" in crew[1].stall()


def test_a_stall_of_all_processes_names_none(clock, crew):
  for each in crew:
    each.step = 0
  run(clock, crew, 102)
  message = crew[0].stall()
  assert message.startswith("step 0 has not ended for 10")
  assert message.endswith("in any process")


def test_no_stall_is_reported_before_or_after_training(clock, crew):
  crew[0].step = crew[1].step = 9
  run(clock, crew, 200)
  assert crew[0].stall() is None


# Code that aborts: JAX raises SIGABRT; gloo throws an exception in one of its
# threads, which calls std::terminate.
ABORTS = """
import ctypes, os, threading, time
from experiments.distributed import exit
exit.HEARTBEAT_TIMEOUT = exit._GRACE = 0
exit.exit_on_abort()
exit.exit_on_abort()
{abort}
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="JAX uses libstdc++ there")
@pytest.mark.parametrize(
  "abort",
  [
    "os.abort()",
    "terminate = ctypes.CDLL('libstdc++.so.6')['_ZSt9terminatev']\n"
    "threading.Thread(target=terminate, daemon=True).start()",
  ],
)
def test_an_abort_ends_the_process_with_a_message_and_code_1(abort):
  ended = subprocess.run(
    [sys.executable, "-c", ABORTS.format(abort=abort)],
    env=processes.environment(),
    capture_output=True,
    text=True,
  )
  last = ended.stderr.splitlines()[-1]
  assert last.startswith("error: process 0: JAX stopped this process"), last
  assert ended.returncode == 1
  assert ("terminate called" in ended.stderr) == ("terminate" in abort)
