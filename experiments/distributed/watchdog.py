"""Multi-host watchdog: ends the run when a training step stalls."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import jax

from experiments.distributed import exit as exit_lib
from experiments.errors import UserError

_INTERVAL = 1.0  # seconds between two exchanges
_KEY = "attention/step/"


class Watchdog:
  """Compares the training steps of all processes."""

  def __init__(
    self,
    client,
    index: int,
    count: int,
    stall_seconds: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    # The step that this process computes. None before the first and after the
    # last step: then no stall is reported.
    self.step: int | None = None
    self._client, self._index, self._count = client, index, count
    self._stall_seconds, self._clock = stall_seconds, clock
    self._steps: dict[int, int] = {}
    self._changed = clock()

  def exchange(self) -> None:
    """Publishes this process's step and reads those of the others."""
    self._client.key_value_set(
      f"{_KEY}{self._index}", str(self.step), allow_overwrite=True
    )
    steps = {
      int(key.removeprefix(_KEY)): int(step)
      for key, step in self._client.key_value_dir_get(_KEY)
      if step != str(None)
    }
    if steps != self._steps:
      self._steps, self._changed = steps, self._clock()

  def stall(self) -> str | None:
    """Returns a message that names the stalled processes, or None."""
    still = self._clock() - self._changed
    if still < self._stall_seconds or len(self._steps) < self._count:
      return None
    first, last = min(self._steps.values()), max(self._steps.values())
    if first == last:
      return f"step {first} has not ended for {still:.0f} s in any process"
    stalled = [
      str(index) for index, step in sorted(self._steps.items()) if step == first
    ]
    return (
      f"step {first} has not ended for {still:.0f} s in process"
      f" {', '.join(stalled)}; other processes are at step {last}"
    )


@contextlib.contextmanager
def watch(stall_seconds: float) -> Iterator[Watchdog]:
  """Ends this process once no process has ended a step for `stall_seconds`."""
  client = exit_lib.coordination_client()
  watchdog = Watchdog(
    client, jax.process_index(), jax.process_count(), stall_seconds
  )
  if client is None:  # a single process
    yield watchdog
    return
  done = threading.Event()
  thread = threading.Thread(target=_run, args=(watchdog, done), daemon=True)
  thread.start()
  try:
    yield watchdog
  except UserError:
    raise
  except Exception:
    # If another process has died, JAX reports it and ends this one meanwhile.
    time.sleep(exit_lib.HEARTBEAT_TIMEOUT + 5)
    raise
  finally:
    done.set()
    thread.join(2 * _INTERVAL)  # It may wait for a lost service.


def _run(watchdog: Watchdog, done: threading.Event) -> None:
  """Ends the process on a stall, until `done` is set."""
  while not done.wait(_INTERVAL):
    # JAX itself ends this process when the service is lost.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      watchdog.exchange()
      if (stall := watchdog.stall()) and not done.is_set():
        exit_lib.report(stall)
        exit_lib.exit_process(1)
