"""Processes that watch over each other, so that none waits for a dead one.

Every process tells all others, through JAX's coordination service, that it
lives and which step it is at.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import jax

from experiments.distributed import initialize
from experiments.errors import UserError

# Seconds between two beats; after how many without one a process is dead.
BEAT, SILENCE = 1.0, 15.0
_KEY, _END, _TROUBLE = "attention/beat/", "end", "trouble"
# Of a process that has failed, before why; and how long others may take to say
# that the same has happened to them.
_FAILED, _GRACE = "failed ", 5.0
# How long a process that C++ is about to end may take to hear who is dead.
_LINGER = SILENCE + 10 * BEAT


class LostProcessError(UserError):
  """Another process has died or hangs, and this one cannot go on."""

  code = 1


class Heartbeat:
  """The beats of all processes, as one of them hears them.

  Attributes:
    step: the step that this process is at, for it to set; None before the
      first and after the last, which may take any time.
    beats: how often it has been heard and has heard of the others.

  Example:
    >>> with watch(stall_seconds=60) as heartbeat:
    ...   heartbeat.step = 1
  """

  def __init__(self, client, index: int, count: int, stall_seconds: float):
    """Begins to listen.

    Args:
      client: of the coordination service, with `key_value_set` and
        `key_value_dir_get`.
      index: of this process.
      count: of all processes.
      stall_seconds: after which steps that do not go on have stalled.
    """
    self.step: int | None = None
    self.beats = 0
    self._client, self._index = client, index
    self._stall_seconds = stall_seconds
    now = time.monotonic()
    # Of processes that have begun to beat and have not ended.
    self._heard: dict[int, tuple[str, float]] = {}
    self._steps: dict[int, int | None] = dict.fromkeys(range(count))
    self._failed: dict[int, tuple[str, float]] = {}
    self._moved, self._told = now, ""

  def beat(self) -> None:
    """Tells the others of this process, and hears of them."""
    self._say(f"{self.beats} {'' if self.step is None else self.step}")
    self.hear()
    self.beats += 1

  def hear(self) -> None:
    """Hears what the others say."""
    now, before = time.monotonic(), dict(self._steps)
    for key, value in self._client.key_value_dir_get(_KEY):
      name = key.rsplit("/", 1)[-1]
      if name == _TROUBLE:
        self._told = value
        continue
      process = int(name)
      if value == _END or value.startswith(_FAILED):
        self._heard.pop(process, None)
        self._steps[process] = None
        if value != _END and process != self._index:
          why = value.removeprefix(_FAILED)
          self._failed.setdefault(process, (why, now))
        continue
      last, _ = self._heard.get(process, ("", now))
      if process != self._index and value != last:
        self._heard[process] = value, now
      step = value.split(" ")[1]
      self._steps[process] = int(step) if step else None
    if self._steps != before:
      self._moved = now

  def tell(self, trouble: str) -> None:
    """Tells the others why this process is about to leave.

    The first process, without which nobody hears anything, waits for them.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.key_value_set(
        f"{_KEY}{_TROUBLE}", trouble, allow_overwrite=True
      )
      self._leave_last()

  def end(self) -> None:
    """Tells the others not to wait for another beat."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._say(_END)

  def fail(self, why: str) -> None:
    """Tells the others that this process goes, and they cannot go on."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._say(f"{_FAILED}{why}")
      self._leave_last()

  def _say(self, value: str) -> None:
    self._client.key_value_set(
      f"{_KEY}{self._index}", value, allow_overwrite=True
    )

  def _leave_last(self) -> None:
    """Has the first process wait until the others are gone."""
    deadline = time.monotonic() + 2 * SILENCE
    while not self._index and time.monotonic() < deadline:
      self.hear()
      if len(self.silent(3 * BEAT)) == len(self._heard):
        break
      time.sleep(BEAT)

  def silent(self, seconds: float = SILENCE) -> list[int]:
    """The processes that have not been heard of for so long."""
    now = time.monotonic()
    return [
      process
      for process, (_, heard) in list(self._heard.items())
      if now - heard > seconds
    ]

  def trouble(self) -> str | None:
    """Says who is dead or hangs, if anybody."""
    if self._told:
      return self._told
    if dead := self.silent():
      return (
        f"{named(dead)} not been heard of for {SILENCE:.0f} s, and was last"
        f" {_at(self._steps[dead[0]])}"
      )
    for process, (why, heard) in list(self._failed.items()):
      if time.monotonic() - heard >= _GRACE:
        return f"process {process} has failed: {why}"
    steps = [step for step in self._steps.values() if step is not None]
    still = time.monotonic() - self._moved
    if still < self._stall_seconds or len(steps) < len(self._steps):
      return None
    last, furthest = min(steps), max(steps)
    behind = [i for i, step in self._steps.items() if step == last]
    if last == furthest:
      return f"no process has got beyond step {last} for {still:.0f} s"
    return (
      f"{named(behind)} not got beyond step {last} for {still:.0f} s, where"
      f" others are at step {furthest}"
    )


def _at(step: int | None) -> str:
  return "outside of training" if step is None else f"at step {step}"


def named(processes: list[int]) -> str:
  """Begins a sentence on processes.

  Args:
    processes: their indices, one at least.

  Returns:
    Their names, and "has" or "have".

  Example:
    >>> named([1]), named([1, 2, 5])
    ('process 1 has', 'processes 1, 2 and 5 have')
  """
  if len(processes) == 1:
    return f"process {processes[0]} has"
  *first, last = map(str, processes)
  return f"processes {', '.join(first)} and {last} have"


@contextlib.contextmanager
def watch(stall_seconds: float) -> Iterator[Heartbeat]:
  """Watches over the other processes, and stops this one if it has to.

  A process that is alone watches nobody.

  Args:
    stall_seconds: after which steps that do not go on have stalled.

  Yields:
    A heartbeat, whose `step` is to be set.

  Raises:
    LostProcessError: where JAX fails since another process is dead.

  Example:
    >>> with watch(stall_seconds=60) as heartbeat:
    ...   heartbeat.silent()
    []
  """
  count, index = jax.process_count(), jax.process_index()
  client = initialize.coordination_client()
  heartbeat = Heartbeat(client, index, count, stall_seconds)
  if count == 1:
    yield heartbeat
    return
  initialize.linger(_LINGER)
  done = threading.Event()
  threads = [
    threading.Thread(
      target=target,
      args=(heartbeat, done),
      daemon=True,
      name=initialize.HEARTBEAT,
    )
    for target in (_listen, _guard)
  ]
  for thread in threads:
    thread.start()

  def stop_listening() -> None:
    done.set()
    for thread in threads:
      thread.join(2 * BEAT)  # it may wait for a service that is gone

  try:
    yield heartbeat
  except BaseException as error:
    reason = None
    if isinstance(error, Exception) and not isinstance(error, UserError):
      # Whatever becomes of a broken connection. Who is dead is sure once it
      # has missed a few beats.
      time.sleep(5 * BEAT)
      if dead := heartbeat.silent(4 * BEAT):
        where = heartbeat.step
        reason = f"{named(dead)} stopped"
        reason += "" if where is None else f", after step {where - 1}"
    stop_listening()
    if reason is None:
      heartbeat.fail(str(error).split("\n")[0] or type(error).__name__)
      raise
    heartbeat.tell(reason)
    raise LostProcessError(_told(reason)) from error
  stop_listening()
  heartbeat.end()


def _listen(heartbeat: Heartbeat, done: threading.Event) -> None:
  """Beats until it is done; whoever cannot go on leaves at once."""
  while not done.wait(BEAT):
    try:
      heartbeat.beat()
      trouble = heartbeat.trouble()
    except jax.errors.JaxRuntimeError as error:
      trouble = f"process 0, which coordinates, cannot be reached ({error})"
    if trouble and not done.is_set():
      done.set()
      _say_error(trouble)
      heartbeat.tell(trouble)
      initialize.leave(LostProcessError.code)


def _guard(heartbeat: Heartbeat, done: threading.Event) -> None:
  """Sees to it that nobody listens for ever to a process 0 that hangs."""
  beats, waited = heartbeat.beats, 0.0
  while not done.wait(BEAT):
    waited = waited + BEAT if heartbeat.beats == beats else 0.0
    beats = heartbeat.beats
    if waited >= SILENCE:
      _say_error(
        f"process 0, which coordinates, has not answered for {SILENCE:.0f} s"
      )
      initialize.leave(LostProcessError.code)


def _say_error(trouble: str) -> None:
  with contextlib.suppress(OSError, ValueError):  # nobody reads any more
    print(f"error: {_told(trouble)}", file=sys.stderr, flush=True)


def _told(trouble: str) -> str:
  return (
    f"process {jax.process_index()}: {trouble}. This one stops too; the same"
    " command goes on from the last checkpoint."
  )
