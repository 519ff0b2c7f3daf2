"""Who is dead, who hangs, and who has merely ended; with a clock of our own."""

import signal
import subprocess
import sys

import pytest

from experiments.distributed import watchdog as heartbeat_lib
from experiments.distributed.watchdog import SILENCE, Heartbeat


class Service:
  """What all processes tell each other, as JAX's service keeps it."""

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


@pytest.fixture
def clock(monkeypatch):
  class Clock:
    now = 1000.0

  monkeypatch.setattr(heartbeat_lib.time, "monotonic", lambda: Clock.now)

  def sleep(seconds):
    Clock.now += seconds

  monkeypatch.setattr(heartbeat_lib.time, "sleep", sleep)
  return Clock


@pytest.fixture
def crew(clock):
  del clock
  service = Service()
  return [Heartbeat(service, i, 3, stall_seconds=100) for i in range(3)]


def live(clock, crew, seconds):
  for _ in range(seconds):
    clock.now += 1
    for each in crew:
      each.beat()


def test_as_long_as_all_beat_and_move_there_is_no_trouble(clock, crew):
  for step in range(50):
    for each in crew:
      each.step = step
    live(clock, crew, 5)
    assert all(each.trouble() is None for each in crew)
    assert all(each.silent(2) == [] for each in crew)


def test_one_that_stops_beating_is_named(clock, crew):
  for each in crew:
    each.step = 7
  live(clock, crew, 3)
  live(clock, crew[:2], int(SILENCE) - 1)
  assert crew[0].trouble() is None
  live(clock, crew[:2], 3)
  assert crew[0].trouble() == (
    "process 2 has not been heard of for 15 s, and was last at step 7"
  )
  live(clock, crew[:1], int(SILENCE) + 2)
  assert "processes 1 and 2 have not been heard of" in crew[0].trouble()


def test_one_that_fails_is_told_of_after_a_while(clock, crew):
  live(clock, crew, 2)
  crew[1].fail("the disk is full")
  live(clock, [crew[0], crew[2]], 3)
  assert crew[2].trouble() is None  # it may have found the same
  live(clock, [crew[0], crew[2]], 3)
  assert crew[2].trouble() == "process 1 has failed: the disk is full"
  assert crew[1].trouble() is None


def test_outside_of_training_nothing_stalls(clock, crew):
  crew[0].step = crew[1].step = 9
  live(clock, crew, 200)
  assert crew[0].trouble() is None
  live(clock, crew[:2], int(SILENCE) + 2)
  assert crew[0].trouble().endswith("and was last outside of training")


def test_one_that_has_not_begun_is_waited_for(clock, crew):
  live(clock, crew[:2], 60)
  assert crew[0].trouble() is None


def test_one_that_has_ended_is_not_missed(clock, crew):
  live(clock, crew, 3)
  crew[2].end()
  live(clock, crew[:2], 60)
  assert crew[0].trouble() is None


def test_whoever_is_behind_a_stalled_step_is_named(clock, crew):
  for each, step in zip(crew, (9, 8, 9)):
    each.step = step
  live(clock, crew, 99)
  assert crew[0].trouble() is None
  live(clock, crew, 3)
  assert (
    crew[2].trouble().startswith("process 1 has not got beyond step 8 for 10")
  )
  assert crew[2].trouble().endswith("where others are at step 9")


def test_where_all_stand_still_nobody_is_blamed(clock, crew):
  for each in crew:
    each.step = 0
  live(clock, crew, 102)
  assert crew[0].trouble().startswith("no process has got beyond step 0")


def test_what_one_finds_the_others_are_told(clock, crew):
  live(clock, crew, 2)
  crew[1].tell("process 2 has stopped, after step 3")
  live(clock, crew[:1], 1)
  assert crew[0].trouble() == "process 2 has stopped, after step 3"


def test_the_first_process_leaves_last(clock, crew):
  live(clock, crew, 2)
  begin = clock.now
  crew[0].tell("process 2 has stopped")  # and the others beat no more
  assert 3 <= clock.now - begin <= 2 * SILENCE


# A thread in which C++ ends the process, which says a word half a second later.
TERMINATES = """
import ctypes, threading, time
from experiments.distributed import initialize as runtime
runtime.linger(1.0)
runtime.linger(1.0)
cpp = ctypes.CDLL("libstdc++.so.6")
threading.Thread(target=cpp["_ZSt9terminatev"], daemon=True).start()
time.sleep(0.5)
print("a last word", flush=True)
time.sleep(1.0)
print("too late", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="JAX uses libstdc++ there")
def test_what_cpp_ends_has_time_for_a_last_word():
  ended = subprocess.run(
    [sys.executable, "-c", TERMINATES], capture_output=True, text=True
  )
  assert ended.stdout == "a last word\n"
  assert ended.returncode == -signal.SIGABRT
  assert "terminate called" in ended.stderr
