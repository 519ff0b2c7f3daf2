"""A lock that allows one training process per run directory."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from absl import logging

from experiments.errors import UserError
from experiments.run_directory.files import writing
from experiments.run_directory.remote import is_remote

LOCK = ".lock"


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
  """Holds the lock of a directory, which is created if it does not exist."""
  if is_remote(workdir):
    warning = "%s cannot be locked; make sure that no other run uses it"
    logging.warning(warning, workdir)
    yield
    return
  with _held(workdir) as file:
    with writing(workdir):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()}")
      file.flush()
    yield


def lock(file: IO, path: Path) -> bool:
  """Locks a file of `path` until it is closed; False if another process has it.

  Warns if the file system has no locks.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    warning = "%s cannot be locked (%s); make sure that no other run uses it"
    logging.warning(warning, path, error.strerror)
  return True


def _held(workdir: Path) -> TextIO:
  """Opens and locks the lock file; the lock ends with the process."""
  path, flags = workdir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
  while True:
    with writing(workdir):
      workdir.mkdir(parents=True, exist_ok=True)
      file = os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8")
    if not lock(file, workdir):
      with file:
        holder = file.read() or "it has just started"
      raise UserError(
        f"--workdir={workdir}: another run uses this directory: {holder}; wait"
        " for its end, stop it, or use another directory"
      )
    # `release` of the previous holder may have deleted the file.
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.fstat(file.fileno()), path.stat()):
        return file
    file.close()
