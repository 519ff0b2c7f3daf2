"""Runs the binaries in forks of a server process that has imported JAX.

The server, `python -m tests.experiments.binaries`, reads requests as lines of
JSON and writes a line for each. `run` and `start` send the requests.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref

from tests import compilation
from tests.experiments import processes


class Started:
  """A binary that runs in a fork of the server."""

  def __init__(self, module, arguments, text="", cwd=processes.ROOT):
    folder = pathlib.Path(tempfile.mkdtemp())
    content = text if isinstance(text, bytes) else text.encode()
    (folder / "stdin").write_bytes(content)
    self._code = None
    self._output = {name: folder / name for name in ("stdout", "stderr")}
    self._pid = _ask(
      module=module,
      arguments=list(map(str, arguments)),
      cwd=str(cwd),
      folder=str(folder),
    )
    # A failed test may never call `wait`.
    self._discard = weakref.finalize(self, _discard, self._pid, folder)

  def send_signal(self, number):
    os.kill(self._pid, number)

  def poll(self):
    if self._code is None:
      self._code = _ask(poll=self._pid)
    return self._code

  def wait(self):
    """Returns code, standard output and standard error."""
    while self.poll() is None:
      time.sleep(0.02)
    output = [path.read_text("utf-8") for path in self._output.values()]
    self._discard.detach()
    shutil.rmtree(self._output["stdout"].parent)
    return self._code, *output


def _discard(pid, folder):
  """Kills a process that was not waited for, and deletes its output."""
  with contextlib.suppress(ProcessLookupError):
    os.kill(pid, signal.SIGKILL)
  shutil.rmtree(folder, ignore_errors=True)


def start(module, *arguments, **options):
  """Starts `python -m experiments.MODULE ARGUMENTS`."""
  return Started(module, arguments, **options)


def run(module, *arguments, **options):
  """Runs a binary; returns code, standard output, standard error."""
  return start(module, *arguments, **options).wait()


@functools.cache
def _server():
  server = subprocess.Popen(
    [sys.executable, "-m", "tests.experiments.binaries"],
    cwd=processes.ROOT,
    env=processes.environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )

  @atexit.register
  def stop():
    server.stdin.close()
    server.wait()

  return server


def _ask(**request):
  server = _server()
  server.stdin.write(json.dumps(request) + "\n")
  server.stdin.flush()
  return json.loads(server.stdout.readline())


def _serve() -> None:
  import experiments.inference
  import experiments.training.loop  # noqa: F401

  compilation.install()
  for line in sys.stdin:
    request = json.loads(line)
    if "poll" in request:
      pid, status = os.waitpid(request["poll"], os.WNOHANG)
      reply = os.waitstatus_to_exitcode(status) if pid else None
    elif not (reply := os.fork()):
      _run(**request)
    print(json.dumps(reply), flush=True)


def _run(module, arguments, cwd, folder) -> None:
  """Becomes the binary; never returns."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    flags = os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_CREAT
    os.dup2(os.open(os.path.join(folder, name), flags), number)
  sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
  os.chdir(cwd)
  name = f"experiments.{module}"
  sys.argv = [name, *arguments]
  code = 1
  try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    code = 0
  except SystemExit as error:
    code = error.code if isinstance(error.code, int) else int(bool(error.code))
  except BaseException:
    import traceback

    traceback.print_exc()
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
  _serve()
