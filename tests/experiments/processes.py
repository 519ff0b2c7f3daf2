"""Runs the binaries in processes forked from one that has imported JAX."""

import atexit
import functools
import json
import os
import pathlib
import re
import select
import socket
import subprocess
import sys
import tempfile

from tests import compilation

ROOT = pathlib.Path(__file__).parents[2]

# A config file with the config of `conftest.make_tiny`.
CONFIG = """
from tests.experiments.conftest import make_tiny

def get_config(arg=""):
  return make_tiny(arg)
"""

# A config of many steps and checkpoints, for tests that interrupt the run.
LONG = """
from tests.experiments.conftest import make_tiny

def get_config(arg=""):
  config = make_tiny(arg)
  del config.data.splits["longer"]
  config.train.update(
    steps=240, log_every=5, checkpoint_every=6, eval_every=60, keep_last=2
  )
  return config
"""


def environment(devices=1, **variables):
  flags = os.environ["XLA_FLAGS"]
  return {
    **os.environ,
    **compilation.ENVIRONMENT,
    "XLA_FLAGS": re.sub(r"(device_count)=\d+", rf"\1={devices}", flags),
    "PYTHONPATH": str(ROOT),
    **variables,
  }


class Forked(subprocess.Popen):
  """A process of `tests.experiments.forks`, with the interface of `Popen`."""

  def __init__(self, module, arguments, *, code="", **options):
    self._request = {"module": module, "arguments": arguments, "code": code}
    super().__init__([module, *arguments], **options)

  def _execute_child(self, *arguments):
    # Python 3.11 to 3.13 pass: arguments, executable, preexec_fn, close_fds,
    # pass_fds, cwd, env, startupinfo, creationflags, shell, six file
    # descriptors, and more.
    pipes = arguments[10:16]
    request = {
      **self._request,
      "folder": str(arguments[5]),
      "environment": arguments[6],
    }
    self._connection = socket.socket(socket.AF_UNIX)
    self._connection.connect(_server())
    socket.send_fds(
      self._connection,
      [json.dumps(request).encode()],
      [pipes[0], pipes[3], pipes[5]],
    )
    self._replies = self._connection.makefile()
    self.pid = int(self._replies.readline())
    self._child_created = True
    self._close_pipe_fds(*pipes)

  def _internal_poll(self, **_):
    if self.returncode is None and self._has_ended(0):
      self.returncode = int(self._replies.readline())
      self._replies.close()
      self._connection.close()
    return self.returncode

  def _wait(self, timeout):
    if self.returncode is None and not self._has_ended(timeout):
      raise subprocess.TimeoutExpired(self.args, timeout)
    return self._internal_poll()

  def _has_ended(self, timeout):
    return bool(select.select([self._connection], [], [], timeout)[0])


@functools.cache
def _server():
  """Starts the process that is forked; returns the path of its socket."""
  folder = tempfile.TemporaryDirectory(prefix="forks-")
  path = f"{folder.name}/socket"
  server = subprocess.Popen(
    [sys.executable, "-m", "tests.experiments.forks", path],
    cwd=ROOT,
    # The binaries set this variable before they import JAX.
    env=environment(TF_CPP_MIN_LOG_LEVEL="2"),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  assert server.stdout.readline() == b"ready\n"

  @atexit.register
  def stop():
    server.stdin.close()
    server.wait()
    folder.cleanup()

  return path


def start(module, *arguments, cwd=ROOT, stdin=False, **options):
  """Starts `python -m experiments.MODULE ARGUMENTS`.

  Forks it, unless `options` set environment variables: they may have an effect
  only when Python or JAX starts.
  """
  module, arguments = f"experiments.{module}", [*map(str, arguments)]
  pipes = {
    "cwd": cwd,
    "env": environment(**options),
    "stdin": subprocess.PIPE if stdin else subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "encoding": "utf-8",
    "errors": "surrogateescape",
  }
  if options.keys() - {"devices"}:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], **pipes)
  return Forked(module, arguments, **pipes)


def crew(count, module, *arguments, **special):
  """Starts a run of several processes without `launch.sh`.

  p2="code" in `special` makes process 2 execute this Python code first.
  """
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  return [
    Forked(
      f"experiments.{module}",
      [*map(str, arguments)],
      code=special.get(f"p{index}", ""),
      cwd=ROOT,
      env=environment(
        JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
        JAX_NUM_PROCESSES=str(count),
        JAX_PROCESS_ID=str(index),
      ),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in range(count)
  ]


def launch(count, module, *arguments):
  """Starts `./launch.sh local COUNT python -m experiments.MODULE ...`."""
  return subprocess.Popen(
    [
      ROOT / "launch.sh",
      "local",
      str(count),
      sys.executable,
      "-m",
      f"experiments.{module}",
      *map(str, arguments),
    ],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(module, *arguments, text="", **options):
  """Runs a binary on a text; returns code, standard output, standard error."""
  process = start(module, *arguments, stdin=True, **options)
  out, error = process.communicate(text, timeout=600)
  return process.returncode, out, error


def succeeded(*arguments, **options):
  """The outputs of a binary that must end with code 0, as of `run`."""
  code, *outputs = run(*arguments, **options)
  assert code == 0, outputs
  return outputs


def refused(*arguments, **options):
  """The error message of a binary that must refuse its arguments."""
  code, _, error = run(*arguments, **options)
  assert code == 2, error
  assert "Traceback" not in error
  return error


def write_config(folder, text=CONFIG, name="tiny.py"):
  path = folder / name
  path.write_text(text)
  return path
