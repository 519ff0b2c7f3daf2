"""What the binaries share: the config flag, quiet logs, errors as messages."""

import contextlib
import ctypes
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from experiments.errors import UserError

_CACHE = "~/.cache/attention-jax"


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
  error and exit code 2; an interrupt is exit code 130.

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

  def parse(argv: Sequence[str]) -> list[str]:
    logging.set_verbosity(logging.ERROR)  # what libraries say of flags
    try:
      _check_config_file(argv, config)
      rest = flags.FLAGS(list(argv))
      if config:
        _check_config(flags.FLAGS[config])
    except flags.Error as error:
      _die(f"{_last_line(error)}\nSee --help.")
    except UserError as error:
      _die(str(error))
    except (AttributeError, KeyError) as error:
      _die(_explain_override(error, argv) or _explain(error))
    except Exception as error:  # whatever a config file raises
      _die(_explain(error))
    given = rest[1:]
    if len(given) > len(positional):
      unknown = given[len(positional)]
      _die(f"unknown argument {unknown!r}; flags begin with --. See --help.")
    if missing := positional[len(given) :]:
      usage = " ".join(positional)
      _die(f"missing {' and '.join(missing)}; give {usage}. See --help.")
    return rest

  def guarded(argv: Sequence[str]) -> None:
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().setFormatter(_Plain())
    _quiet()
    try:
      code = main(*argv[1:])
    except UserError as error:
      _die(str(error))
    except KeyboardInterrupt:
      _die("interrupted", 130)
    except Exception:
      if not _is_one_of_several():
        raise
      traceback.print_exc()
      _leave(1)
    sys.exit(code or 0)

  app.run(guarded, flags_parser=parse)


def set_up_jax() -> None:
  """Joins the other processes, if any, and keeps compiled code on disk.

  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
  `launch.sh` sets, make a process one of several. JAX_COMPILATION_CACHE_DIR
  moves the cache of compiled code.

  Raises:
    UserError: if there is an address and no number of processes or of this one.

  Example:
    >>> set_up_jax()  # doctest: +SKIP
  """
  import jax

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = str(Path(_CACHE).expanduser())
    jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  _keep_freed_memory()
  address = os.environ.get("JAX_COORDINATOR_ADDRESS")
  if not address:
    return
  try:
    count = int(os.environ["JAX_NUM_PROCESSES"])
    index = int(os.environ["JAX_PROCESS_ID"])
  except (KeyError, ValueError) as error:
    raise UserError(
      "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and"
      f" JAX_PROCESS_ID must be numbers ({error})"
    ) from None
  jax.distributed.initialize(address, count, index)
  if index:
    logging.set_verbosity(logging.WARNING)


def _keep_freed_memory() -> None:
  """Has glibc keep what is freed, as a step frees what the next one needs.

  By default it returns large blocks to the system, which hands them back page
  by page, filled with zeros: up to a quarter of a step on a CPU. Blocks above
  64 MiB it keeps for the main thread alone, hence no dispatch from others.
  """
  mmap_max, trim_threshold = -4, -1  # of malloc.h
  with contextlib.suppress(OSError, AttributeError):  # another C library
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


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
      return ours or record.levelno > python_logging.WARNING

  logging.get_absl_handler().addFilter(OnlyOurs())
  for name in ("jax", "orbax", "grain"):
    python_logging.getLogger(name).setLevel(python_logging.ERROR)
  warnings.filterwarnings("ignore", category=UserWarning)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _check_config_file(argv: Sequence[str], config: str | None) -> None:
  """Says what is wrong with the config's file before it is executed."""
  for word, following in zip(argv, [*argv[1:], ""]):
    name, equals, value = word.lstrip("-").partition("=")
    if not config or name != config or not word.startswith("-"):
      continue
    path = Path((value if equals else following).partition(":")[0])
    if not path.is_file():
      near = sorted(str(each) for each in path.parent.glob("*.py"))
      there = f"; there are: {', '.join(near)}" if near else ""
      raise UserError(f"--{config}={path}: no such file{there}")
    text = path.read_text(encoding="utf-8", errors="replace")
    if "get_config" not in text:
      raise UserError(
        f"--{config}={path}: has no get_config(arg), which returns a"
        " ConfigDict; see configs/reverse.py"
      )


def _last_line(error: Exception) -> str:
  """What went wrong, where a library's message is a whole traceback."""
  text = str(error).strip()
  if "Traceback" not in text:
    return text
  return f"--config: {text.splitlines()[-1].strip()}"


def _explain_override(error: Exception, argv: Sequence[str]) -> str | None:
  """Names the `--config.field` of which a config says it has no such field."""
  found = re.search(r"'(\w+)\\?'", str(error))
  given = [word.lstrip("-").partition("=")[0] for word in argv]
  for name in given:
    if found and "." in name and found[1] in name.split("."):
      close = re.search(r'Did you mean "(\w+)"', str(error))
      hint = f"; did you mean {close[1]!r}?" if close else ""
      return f"--{name}: no such field{hint}"
  return None


def _explain(error: Exception) -> str:
  """One line for what a config file raised, with the line that did."""
  frames = traceback.extract_tb(error.__traceback__)
  ours = ("/ml_collections/", "/absl/", "/experiments/cli.py")
  outside = [
    frame
    for frame in frames
    if not any(part in frame.filename for part in ours)
    and not frame.filename.startswith("<")
  ]
  where = ""
  if outside:
    frame = outside[-1]
    where = f"{os.path.relpath(frame.filename)}, line {frame.lineno}: "
  return f"{where}{type(error).__name__}: {error}"


def _check_config(flag) -> None:
  """Says what is wrong with what `get_config` returned."""
  if not flag.present:
    raise UserError(
      f"--{flag.name} is required, such as --{flag.name}=configs/reverse.py"
    )
  if not isinstance(flag.value, ConfigDict):
    raise UserError(
      f"--{flag.name}={config_flags.get_config_filename(flag)}: get_config"
      f" returned {type(flag.value).__name__}, not an ml_collections.ConfigDict"
    )


def _is_one_of_several() -> bool:
  jax = sys.modules.get("jax")
  return jax is not None and jax.process_count() > 1


def _leave(code: int) -> None:
  """Exits; as one process of several, without waiting for the others.

  JAX waits at exit until all processes are there, so that the launcher would
  not hear of a failure before the others, which wait for this one, time out.
  """
  if not _is_one_of_several():
    sys.exit(code)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _die(message: str, code: int = 2) -> None:
  print(f"error: {message}", file=sys.stderr, flush=True)
  _leave(code)
