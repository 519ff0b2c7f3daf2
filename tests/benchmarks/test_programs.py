"""The command lines of the benchmarks."""

import subprocess
import sys

import pytest

from tests.experiments.processes import ROOT, environment

FOLDER = ROOT / "benchmarks"
PROGRAMS = [
  path
  for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py"))
  if path != FOLDER / "__init__.py"
]


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_every_program_parses_flags_like_the_experiments(path):
  assert 'if __name__ == "__main__":' in path.read_text()
  assert "  cli.run(main" in path.read_text()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["rnn_states"], "missing RUN...; give RUN... (see --help)"),
    (["rnn_states", "--wrong"], "Unknown command line flag 'wrong'"),
    (["rnn_states", "{tmp}", "{tmp}"], "{tmp}: not a run directory"),
  ],
)
def test_a_usage_error_exits_with_code_2(arguments, message, tmp_path):
  name, *rest = (each.format(tmp=tmp_path) for each in arguments)
  done = subprocess.run(
    [sys.executable, "-m", f"benchmarks.{name}", *rest],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2, done.stderr
  assert message.format(tmp=tmp_path) in done.stderr
  assert "Traceback" not in done.stderr
