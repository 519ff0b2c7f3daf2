"""One run at a time."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from experiments.errors import UserError
from experiments.workdir.files import writing

LOCK = ".lock"


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
  """Keeps a directory from being trained in twice at a time.

  The lock goes with the process, however that ends.

  Args:
    workdir: the directory, which may not exist yet.

  Yields:
    Nothing.

  Raises:
    UserError: if another process holds it, which is named; or if the directory
      cannot be written.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder)):
    ...   with locked(Path(folder)):
    ...     pass
    Traceback (most recent call last):
    experiments.errors.UserError: ...another run is at work in it: process ...
  """
  with writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    file = os.fdopen(
      os.open(workdir / LOCK, flags, 0o666), "r+", encoding="utf-8"
    )
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise UserError(
        f"--workdir={workdir}: another run is at work in it: {file.read()};"
        " wait for its end, stop it, or use another directory"
      ) from None
    except OSError as error:
      logging.warning(
        "%s cannot be locked (%s): make sure that no other run uses it",
        workdir,
        error.strerror,
      )
    with writing(workdir):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()}")
      file.flush()
    yield
