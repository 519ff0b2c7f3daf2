"""Functions of all binaries: common flags, log format, error messages."""

import errno
import inspect
import logging as python_logging
import math
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.config.flag import install_parser
from experiments.distributed.exit import exit_process
from experiments.errors import UserError

_PACKAGE = Path(__file__).parent
# Warnings of libraries that are irrelevant to a user.
_HIDDEN_WARNINGS = (
  "Some donated buffers were not usable",  # JAX, of small arrays
  "Sharding info not provided when restoring",  # Orbax, reading parameters
)


def define_config():
  """Defines `--config=FILE[:ARGUMENT]` and `--config.field=value`."""
  holder = config_flags.DEFINE_config_file(
    "config",
    None,
    "The experiment: a file of configs/ and, after a colon, its argument, as"
    " in configs/reverse.py:dot. Any field can be set:"
    " --config.train.steps=100.",
    lock_config=True,
  )
  install_parser()
  return holder


def define_run():
  """Defines `--workdir` and `--checkpoint`."""
  workdir = flags.DEFINE_string(
    "workdir",
    None,
    "The run directory, or its URL (gs://, s3://, az:// or hf://).",
    required=True,
  )
  return workdir, define_checkpoint()


def define_checkpoint():
  """Defines `--checkpoint`, which selects the parameters."""
  return flags.DEFINE_string(
    "checkpoint",
    None,
    "last, best, a step, or last:N and best:N for the mean of N; by default"
    " the config's evaluation.checkpoint.",
  )


def define_search():
  """Defines `--beam_size` and `--length_penalty`."""
  beam_size = flags.DEFINE_integer(
    "beam_size",
    None,
    "Hypotheses of beam search, 1 for greedy decoding; by default the config's"
    " evaluation.beam_size.",
    lower_bound=1,
  )
  length_penalty = flags.DEFINE_float(
    "length_penalty",
    None,
    "Exponent of GNMT's length normalisation, 0 for none; by default the"
    " config's evaluation.length_penalty.",
    lower_bound=0.0,
  )
  check_finite("length_penalty")
  return beam_size, length_penalty


def check_finite(flag: str, *, at_least: float = 0.0) -> None:
  """Refuses NaN, infinity and numbers between 0 and `at_least` for a flag."""

  def is_valid(value):
    if value is None or value == 0:
      return True
    return math.isfinite(value) and value >= at_least

  message = "must be a finite number"
  if at_least:
    message = f"must be 0 or a finite number of at least {at_least:g}"
  flags.register_validator(flag, is_valid, message)


def run(
  main: Callable[..., int | None],
  *,
  needs_config: bool = False,
  positional: Sequence[str] = (),
) -> None:
  """Parses flags, calls `main` with the positional arguments, and exits.

  A name in `positional` that ends with "..." stands for one or more.
  """
  for flag in flags.FLAGS.get_flags_for_module(__name__):
    # --help shows only the flags of the binary.
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  app.run(
    lambda argv: _guarded(main, argv[1:]),
    flags_parser=lambda argv: _parsed(argv, needs_config, positional),
  )


def _parsed(
  argv: Sequence[str], needs_config: bool, positional: Sequence[str]
) -> list[str]:
  """Parses the flags and returns the remaining arguments."""
  logging.set_verbosity(logging.ERROR)  # libraries log during parsing
  try:
    rest = flags.FLAGS(list(argv))
  except flags.Error as error:
    # absl's message about a required flag is "flag --workdir=None: ...".
    required = re.match(r"flag (--\w+)=None: .* other than None", str(error))
    message = f"{required[1]} is required" if required else str(error)
    _die(f"{message}\nSee --help.")
  except UserError as error:
    _die(str(error))
  except SystemExit:  # --help, after which absl exits with code 1
    sys.exit(0)
  except Exception as error:  # setting a field of the config
    _die(f"{type(error).__name__}: {error}")
  if needs_config and not flags.FLAGS["config"].present:
    _die("--config is required, such as --config=configs/reverse.py")
  given = rest[1:]
  repeats = bool(positional) and positional[-1].endswith("...")
  if len(given) > len(positional) and not repeats:
    unknown = given[len(positional)]
    _die(f"unknown argument {unknown!r}; flags begin with --. See --help.")
  if missing := positional[len(given) :]:
    usage = " ".join(positional)
    _die(f"missing {' and '.join(missing)}; give {usage} (see --help)")
  return rest


def _guarded(main: Callable[..., int | None], arguments: Sequence[str]) -> None:
  """Runs `main` and exits with its exit code or that of its error."""
  configure_logs()
  try:
    code = main(*arguments)
    if sys.stdout:  # None if it was closed before the start
      sys.stdout.flush()
  except UserError as error:
    if logging.vlog_is_on(1):
      traceback.print_exc()
    _die(str(error), error.code)
  except BrokenPipeError:  # The reader of standard output has ended.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    exit_process(141)
  except KeyboardInterrupt:
    _die("interrupted", 130)
  except Exception as error:
    if message := _file_error(error) or _memory_error(error):
      _die(message, 1)
    jax = sys.modules.get("jax")
    if jax is None or jax.process_count() == 1:
      raise
    traceback.print_exc()
    exit_process(1)
  sys.exit(code or 0)


class _Formatter(logging.PythonFormatter):
  """Formats INFO as the message, and other levels as "level: message"."""

  def format(self, record) -> str:
    message = record.getMessage()
    if record.levelname == "INFO":
      return message
    return f"{record.levelname.lower()}: {message}"


class _LogFilter(python_logging.Filter):
  """Passes records of this package, and errors of libraries except Orbax."""

  def filter(self, record) -> bool:
    path = Path(record.pathname)
    if path.is_relative_to(_PACKAGE):
      return True
    # Orbax logs errors before it raises them.
    orbax = sys.modules.get("orbax.checkpoint")
    is_orbax = orbax and path.is_relative_to(Path(str(orbax.__file__)).parent)
    return record.levelno > python_logging.WARNING and not is_orbax


def configure_logs() -> None:
  """Shows the logs of this package, and hides warnings of libraries."""
  logging.use_absl_handler()
  logging.set_verbosity(max(logging.INFO, logging.get_verbosity()))
  logging.get_absl_handler().setFormatter(_Formatter())
  logging.get_absl_handler().addFilter(_LogFilter())
  for name in ("jax", "orbax", "grain"):
    python_logging.getLogger(name).setLevel(python_logging.ERROR)
  python_logging.getLogger("asyncio").setLevel(python_logging.CRITICAL)
  for message in _HIDDEN_WARNINGS:
    warnings.filterwarnings("ignore", message, UserWarning)
  threading.excepthook = _thread_error
  sys.unraisablehook = _unraisable_error
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _thread_error(args) -> None:
  """Reports an exception of a thread, unless it is an OSError."""
  # TensorBoard's thread raises one if it cannot write to the run directory; the
  # main thread writes there too, and reports the error.
  if not isinstance(args.exc_value, OSError):
    threading.__excepthook__(args)


def _unraisable_error(unraisable) -> None:
  """Reports an unraisable exception, unless it is of a coroutine of Orbax."""
  # If Orbax cannot read a file, it closes the event loop of its coroutines.
  is_late_read = str(unraisable.exc_value) == "Event loop is closed"
  if not is_late_read and not inspect.iscoroutine(unraisable.object):
    sys.__unraisablehook__(unraisable)


def _file_error(error: Exception) -> str | None:
  """A message for an OSError of a file or a full disk; None for others."""
  if not isinstance(error, OSError):
    return None
  if not error.filename and error.errno not in (errno.ENOSPC, errno.EDQUOT):
    return None
  return f"{error.filename or 'a file or standard output'}: {error.strerror}"


def _memory_error(error: Exception) -> str | None:
  """A message about too little memory; None for other errors."""
  if isinstance(error, MemoryError):
    reason = str(error) or "an allocation failed"
    return (
      f"the machine has too little memory: {reason}\nTraining needs"
      " less with a smaller --config.train.batch_size; decoding with a smaller"
      " --beam_size."
    )
  _, is_memory, details = str(error).partition("RESOURCE_EXHAUSTED: ")
  first, *_ = details.splitlines() or [""]
  # Others are quotas of buckets, and vmem is the memory of a TPU's kernel.
  if not is_memory or "memory" not in first or "vmem" in first:
    return None
  return (
    f"a device has too little memory: {first}\n"
    "Training needs less with a larger --config.train.accumulation, with"
    " --config.model.remat and --config.model.scan_layers (Transformer), or"
    " with --config.mesh.fsdp on several devices; decoding with a smaller"
    " --beam_size."
  )


def _die(message: str, code: int = 2) -> None:
  print(f"error: {message}", file=sys.stderr)
  exit_process(code)
