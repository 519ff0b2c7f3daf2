"""What the binaries share: the config flag, quiet logs, errors as messages."""

import errno
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.config import messages
from experiments.distributed import initialize
from experiments.errors import UserError


def define_config(name: str = "config"):
  """Defines `--config=FILE[:ARGUMENT]` and `--config.field=value`.

  Args:
    name: of the flag.

  Returns:
    A holder whose `value` is the ConfigDict, once the flags are parsed.

  Example:
    >>> config = define_config()  # doctest: +SKIP
    >>> config.value.train.steps  # doctest: +SKIP
    2500
  """
  return config_flags.DEFINE_config_file(
    name,
    None,
    "The experiment: a file of configs/ and, after a colon, its argument, as"
    " in configs/reverse.py:dot. Any field can be set:"
    " --config.train.steps=100.",
    lock_config=True,
  )


def define_checkpoint():
  """Defines `--checkpoint`, of which parameters to answer with.

  Returns:
    A holder whose `value` is a string or None, once the flags are parsed.

  Example:
    >>> checkpoint = define_checkpoint()  # doctest: +SKIP
    >>> checkpoint.value  # doctest: +SKIP
    'last:10'
  """
  return flags.DEFINE_string(
    "checkpoint",
    None,
    "last, best, a step, or last:N and best:N for the mean of N; by default"
    " what the run's config says in evaluation.checkpoint.",
  )


def define_search():
  """Defines `--beam_size` and `--length_penalty`, of how to search.

  Returns:
    Their holders.

  Example:
    >>> beam_size, length_penalty = define_search()  # doctest: +SKIP
    >>> beam_size.value  # doctest: +SKIP
    5
  """
  beam_size = flags.DEFINE_integer(
    "beam_size",
    None,
    "Hypotheses kept while searching, 1 for greedy; by default the config's"
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
  return beam_size, length_penalty


def config_argument(name: str = "config") -> str:
  """Returns what `--config` was given: a path, perhaps with an argument.

  Args:
    name: of the flag, as given to `define_config`.

  Returns:
    The path and, after a colon, the argument.

  Example:
    >>> config_argument()  # doctest: +SKIP
    'configs/reverse.py:dot'
  """
  return config_flags.get_config_filename(flags.FLAGS[name])


def config_arguments(name: str = "config") -> list[str]:
  """Returns what a process needs to be given to have the same config.

  Args:
    name: of the flag, as given to `define_config`.

  Returns:
    The flag and, after it, one for each field that was set.

  Example:
    >>> config_arguments()  # doctest: +SKIP
    ['--config=configs/reverse.py:dot', '--config.train.steps=100']
  """
  flag = flags.FLAGS[name]
  values = config_flags.get_override_values(flag)
  return [
    f"--{name}={config_argument(name)}",
    *(f"--{name}.{field}={value}" for field, value in values.items()),
  ]


def default_workdir(config_argument: str) -> Path:
  """Returns runs/<config>[-<argument>] for a value of `--config`.

  Args:
    config_argument: a path and perhaps an argument after a colon.

  Returns:
    The directory, relative to where the command was given.

  Example:
    >>> str(default_workdir("configs/reverse.py:dot"))
    'runs/reverse-dot'
  """
  path, _, argument = config_argument.partition(":")
  parts = [Path(path).stem, *argument.split(",")]
  return Path("runs") / "-".join(part for part in parts if part)


def run(
  main: Callable[..., int | None],
  *,
  config: str | None = None,
  positional: Sequence[str] = (),
) -> None:
  """Runs a binary: parses flags, then calls `main`.

  A user's mistake, in a flag, a config or a file, is one message on standard
  error and exit code 2; a file that cannot be written is one and exit code 1;
  an interrupt is exit code 130.

  Args:
    main: does the work, given the positional arguments, and returns an exit
      code or None.
    config: the name of the config flag, if it is required.
    positional: what the arguments without a flag are called, all of them
      required. The binary's docstring, which --help shows, says what they are.

  Raises:
    SystemExit: always, with the exit code.

  Example:
    >>> run(main, config="config")  # doctest: +SKIP
  """
  _show_all_in_help()
  app.run(
    lambda argv: _guarded(main, argv[1:]),
    flags_parser=lambda argv: _parsed(argv, config, positional),
  )


def _parsed(
  argv: Sequence[str], config: str | None, positional: Sequence[str]
) -> list[str]:
  """The arguments without a flag, once the flags are parsed."""
  logging.set_verbosity(logging.ERROR)  # what libraries say of flags
  try:
    messages.check_file(argv, config)
    rest = flags.FLAGS(list(argv))
    if config:
      messages.check_value(flags.FLAGS[config])
  except flags.Error as error:
    _die(f"{messages.last_line(error)}\nSee --help.")
  except UserError as error:
    _die(str(error))
  except (AttributeError, KeyError) as error:
    _die(messages.explain_override(error, argv) or messages.explain(error))
  except Exception as error:  # whatever a config file raises
    _die(messages.explain(error))
  given = rest[1:]
  if len(given) > len(positional):
    unknown = given[len(positional)]
    _die(f"unknown argument {unknown!r}; flags begin with --. See --help.")
  if missing := positional[len(given) :]:
    usage = " ".join(positional)
    _die(f"missing {' and '.join(missing)}; give {usage}. See --help.")
  return rest


def _guarded(main: Callable[..., int | None], arguments: Sequence[str]) -> None:
  """Runs `main`, and leaves with its code or with that of what it raises."""
  logging.use_absl_handler()
  logging.set_verbosity(max(logging.INFO, logging.get_verbosity()))
  logging.get_absl_handler().setFormatter(_Plain())
  _quiet()
  try:
    code = main(*arguments)
  except UserError as error:
    if logging.vlog_is_on(1):  # -v=1 shows the causes
      traceback.print_exc()
    _die(str(error), error.code)
  except BrokenPipeError:  # whoever read has read enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    initialize.leave(141)
  except KeyboardInterrupt:
    _die("interrupted", 130)
  except Exception as error:
    if trouble := _trouble_with_a_file(error):
      _die(trouble, 1)
    if not _is_one_of_several():
      raise
    traceback.print_exc()
    initialize.leave(1)
  sys.exit(code or 0)


def _show_all_in_help() -> None:
  """Has --help, which shows the binary's own flags, show those of this file."""
  for flag in flags.FLAGS.get_flags_for_module(__name__):
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


class _Plain(logging.PythonFormatter):
  """INFO is for readers and stands alone; the rest names its level."""

  def format(self, record) -> str:
    message = record.getMessage()
    if record.levelname == "INFO":
      return message
    return f"{record.levelname.lower()}: {message}"


def _quiet() -> None:
  """Keeps the libraries' own remarks out of the way."""
  import logging as python_logging
  import warnings

  class OnlyOurs(python_logging.Filter):
    def filter(self, record) -> bool:
      ours = "experiments" in record.pathname
      # Orbax logs what it then raises as well.
      raised = "orbax" in record.pathname
      return ours or (record.levelno > python_logging.WARNING and not raised)

  logging.get_absl_handler().addFilter(OnlyOurs())
  for name in ("jax", "orbax", "grain"):
    python_logging.getLogger(name).setLevel(python_logging.ERROR)
  python_logging.getLogger("asyncio").setLevel(python_logging.CRITICAL)
  warnings.filterwarnings("ignore", category=UserWarning)
  threading.excepthook = _tell_but_of_unwritten_events
  sys.unraisablehook = _tell_but_of_late_reads
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _tell_but_of_unwritten_events(args) -> None:
  """What ends a thread, but for TensorBoard's that cannot write.

  The main thread, which writes metrics and checkpoints, will say so.
  """
  if not isinstance(args.exc_value, OSError):
    threading.__excepthook__(args)


def _tell_but_of_late_reads(unraisable) -> None:
  """What nobody can catch, but for reads that nobody waits for any more.

  When one file of a checkpoint cannot be read Orbax raises, and the reads of
  the others then find its loop gone, or are never done. There are no other
  coroutines.
  """
  late = str(unraisable.exc_value) == "Event loop is closed"
  if not late and not inspect.iscoroutine(unraisable.object):
    sys.__unraisablehook__(unraisable)


def _trouble_with_a_file(error: Exception) -> str | None:
  """What the system says of a file; None of anything else."""
  if not isinstance(error, OSError):
    return None
  if not error.filename and error.errno not in (errno.ENOSPC, errno.EDQUOT):
    return None
  return f"{error.filename or 'a file'}: {error.strerror}"


def _is_one_of_several() -> bool:
  jax = sys.modules.get("jax")
  return jax is not None and jax.process_count() > 1


def _die(message: str, code: int = 2) -> None:
  print(f"error: {message}", file=sys.stderr)
  initialize.leave(code)
