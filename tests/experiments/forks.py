"""Starts binaries as forks of one process that has imported JAX.

    python -m tests.experiments.forks SOCKET

listens on a Unix socket. A client sends a request as JSON, with the file
descriptors of stdin, stdout and stderr. The server forks a process for it, and
sends its process id and, when it ends, its exit code. The server exits when its
standard input is closed.
"""

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys

from tests import compilation


def serve(path: str) -> dict | None:
  """Forks for each connection; returns, in a fork, the request to run."""
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
  with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
      for key, _ in selector.select():
        if key.fileobj is sys.stdin:
          return None
        connection, _ = listener.accept()
        if not os.fork():
          signal.signal(signal.SIGCHLD, signal.SIG_DFL)
          return _start(connection)
        connection.close()


def _start(connection: socket.socket) -> dict:
  """Forks the process of a request and reports its end; returns in the fork."""
  message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
  child = os.fork()
  if not child:
    connection.close()
    for target, file in enumerate(files):
      os.dup2(file, target)
      os.close(file)
    return json.loads(message)
  for file in files:
    os.close(file)
  connection.sendall(f"{child}\n".encode())
  _, status = os.waitpid(child, 0)
  connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
  os._exit(0)


def main() -> None:
  """Imports the modules of the binaries, but no binary: each defines flags."""
  import tensorboardX  # noqa: F401

  import experiments.comparison.runner
  import experiments.inference.translator
  import experiments.models.rnn.seq2seq
  import experiments.training.loop  # noqa: F401

  compilation.install()
  compilation.share_contexts()
  gc.freeze()
  request = serve(sys.argv[1])
  if request is None:
    return
  os.environ.clear()
  os.environ.update(request["environment"])
  os.chdir(request["folder"])
  sys.argv = [request["module"], *request["arguments"]]
  exec(request["code"], {"__name__": "__main__"})
  runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
