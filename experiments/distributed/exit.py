"""How a process of a run ends: aborts of JAX, errors and exit codes."""

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time

HEARTBEAT_TIMEOUT = 15  # seconds until JAX declares a silent process dead
_GRACE = 5.0  # seconds for which a failed process waits for others that fail
_exiting = False  # whether this process has reported an error of its own


def coordination_client():
  """Returns JAX's client of the coordination service, if connected."""
  return _connection().client if "jax" in sys.modules else None


def _connection():
  """Returns JAX's state of several processes, which has no public name."""
  from jax._src import distributed

  return distributed.global_state


@functools.cache  # which keeps the callbacks alive
def exit_on_abort() -> tuple[object, ...]:
  """Makes an abort print one message and exit with code 1."""
  abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
  terminate_handler = ctypes.CFUNCTYPE(None)

  @abort_handler
  def on_abort(_) -> None:
    try:
      if _exiting:  # with a message and a code of its own
        time.sleep(2 * _GRACE)
      else:
        report(
          "JAX stopped this process, in most cases because another process"
          " died; JAX's messages above name it (the leader is process 0)"
        )
    finally:
      os._exit(1)

  @terminate_handler
  def on_terminate() -> None:
    # gloo may detect a broken connection before JAX has named the dead process.
    time.sleep(HEARTBEAT_TIMEOUT + 2 * _GRACE)
    default()  # shows the exception and aborts

  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, abort_handler]
  libc.signal(signal.SIGABRT, on_abort)
  with contextlib.suppress(OSError, AttributeError):
    # std::set_terminate, of the library that JAX is linked with on Linux.
    install = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    install.argtypes, install.restype = [terminate_handler], terminate_handler
    default = install(on_terminate)
  return on_abort, on_terminate


def report(trouble: str) -> None:
  """Prints why this process, one of several, exits."""
  index = _connection().process_id  # jax.process_index() waits for a backend.
  with contextlib.suppress(OSError, ValueError):  # standard error is closed
    print(
      f"error: process {index}: {trouble}. The same command"
      " resumes from the last checkpoint.",
      file=sys.stderr,
      flush=True,
    )


def exit_process(code: int) -> None:
  """Ends the process from any thread, without exit handlers."""
  # `sys.exit` would wait for the other processes and for Orbax's threads.
  global _exiting
  _exiting = True
  try:
    with contextlib.suppress(OSError, ValueError):  # a closed pipe
      sys.stdout.flush()
      sys.stderr.flush()
    if client := coordination_client():
      # Processes that fail together each print their own error: without this
      # barrier, JAX would abort the others when the coordinator exits.
      with contextlib.suppress(Exception):
        client.wait_at_barrier("exit", round(1000 * _GRACE))
      if _connection().process_id == 0:
        time.sleep(1)  # The coordinator exits last.
  finally:
    os._exit(code)
