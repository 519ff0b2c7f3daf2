"""Signals to stop."""

import gc
import signal
import time

from experiments.distributed import preemption


def test_a_signal_during_garbage_collection_is_a_stop_request(capsys):
  def send(phase, info):
    gc.callbacks.remove(send)
    signal.raise_signal(signal.SIGTERM)

  before = signal.getsignal(signal.SIGTERM)
  with preemption.listen(unit="batch") as signals:
    assert not signals.should_stop(0)
    gc.callbacks.append(send)
    gc.collect()
    deadline = time.monotonic() + 60
    while not signals.should_stop(0) and time.monotonic() < deadline:
      time.sleep(0.01)
    assert signals.should_stop(0)
  assert "SIGTERM: stopping after this batch" in capsys.readouterr().err
  assert signal.getsignal(signal.SIGTERM) == before
