"""Progress: a bar on a terminal, lines elsewhere."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tests.experiments import processes

PROGRAM = """
from experiments.progress import Progress
with Progress(30, start=10) as progress:
  for _ in range(20):
    progress.advance(1, tokens=5, metrics={"loss": 0.5})
"""


@pytest.mark.parametrize(("columns", "bar"), [(120, True), (0, False)])
def test_a_terminal_shows_a_bar_unless_it_has_no_width(columns, bar):
  leader, follower = pty.openpty()
  size = struct.pack("HHHH", 40, columns, 0, 0)
  fcntl.ioctl(follower, termios.TIOCSWINSZ, size)
  subprocess.run(
    [sys.executable, "-c", PROGRAM],
    stderr=follower,
    env=processes.environment(),
    check=True,
  )
  os.close(follower)
  shown = os.read(leader, 100_000).decode(errors="replace")
  os.close(leader)
  assert "step 30/30" in shown
  assert "loss 0.5" in shown
  assert "steps/s" in shown
  assert "tokens/s" in shown
  assert ("%|" in shown) == bar
