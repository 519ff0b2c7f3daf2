"""Progress: a bar on a terminal, lines elsewhere, and timings."""

import io
import os
import re

import pytest
from tqdm import std

from experiments import progress as progress_lib
from experiments.progress import Progress, counting, make_bar, without_bars


class Terminal(io.StringIO):
  def isatty(self):
    return True

  def fileno(self):
    return 2


@pytest.fixture
def terminal(monkeypatch):
  """Standard error as a terminal; returns what it shows."""

  def show(*size, between=lambda: None):
    file, size = Terminal(), os.terminal_size(size)
    monkeypatch.setattr(progress_lib.sys, "stderr", file)
    monkeypatch.setattr(progress_lib.os, "get_terminal_size", lambda _: size)
    advance()
    with counting("line", total=40) as count:
      count(20)
      with without_bars():
        between()
    return file.getvalue()

  return show


def advance():
  with Progress(30, start=10) as progress:
    for step in range(20):
      progress.advance(tokens=5, metrics={"loss": 0.5})
      if step == 10:
        progress.write("a message")
  return progress


@pytest.mark.parametrize(
  "size", [(120, 40), (0, 40), (120, 0), (0, 0)], ids=str
)
def test_a_terminal_shows_a_bar_also_if_its_size_is_unknown(size, terminal):
  shown = terminal(*size)
  assert "step 30/30" in shown
  assert "loss 0.5" in shown
  assert "step/s" in shown
  assert "tokens/s" in shown
  assert "a message\n" in shown
  assert "%|" in shown
  assert "line/s]" in shown  # of a count


def test_lines_are_printed_without_the_bar(terminal):
  def show_line():
    print("a line", file=progress_lib.sys.stderr)

  shown = terminal(120, 40, between=show_line)
  before, after = shown.split("a line\n")
  assert before.endswith("\r")
  assert not before.rpartition("line/s]")[2].strip()
  assert "line/s]" in after


def test_a_log_file_gets_whole_lines(capsys):
  advance()
  first, message, last = capsys.readouterr().err.splitlines()
  assert first.startswith("step 11/30 [00:00<")
  assert message == "a message"
  pattern = r"step 30/30 \[\d\d:\d\d<00:00, .*step/s, loss 0\.5, .*tokens/s\]"
  assert re.fullmatch(pattern, last), last


def test_a_count_in_a_log_file_is_lines(monkeypatch, capsys):
  now = 0.0
  monkeypatch.setattr(std, "time", lambda: now)
  with make_bar(40, " line") as bar:
    now += 20.0
    bar.update(30)
  *_, shown, last = capsys.readouterr().err.splitlines()
  assert shown == "75% 30/40 [00:20<00:06,  1.50 line/s]"
  assert "\r" not in shown + last


def test_the_rate_and_the_time_left_exclude_the_first_step(monkeypatch, capsys):
  now = 0.0
  monkeypatch.setattr(progress_lib.time, "perf_counter", lambda: now)
  monkeypatch.setattr(std, "time", lambda: now)
  with Progress(60, start=0) as progress:
    for seconds in (28.0, *[0.5] * 29):
      now += seconds
      progress.advance(tokens=10, metrics={"loss": 0.5})
  last = capsys.readouterr().err.splitlines()[-1]
  shown = "[00:14<00:15,  2.00step/s, loss 0.5, 20 tokens/s]"
  assert last == f"step 30/60 {shown}"


def test_the_median_step_excludes_compilation(monkeypatch):
  now = 0.0
  monkeypatch.setattr(progress_lib.time, "perf_counter", lambda: now)
  progress = Progress(3, start=0)
  for seconds in (100.0, 0.5, 0.5):
    now += seconds
    progress.advance(tokens=10, metrics={})
  assert progress.timings() == {
    "seconds": 101.0,
    "steps_per_second": pytest.approx(3 / 101),
    "tokens_per_second": pytest.approx(30 / 101),
    "step_milliseconds": 500.0,
  }
