"""How it is measured: compiled ahead of time, in rounds, one after another."""

import dataclasses
import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

try:
  import resource
except ImportError:  # not on every system
  resource = None  # type: ignore[assignment]

from benchmarks.attention import cases

DIRECTIONS = ("forward", "forward+backward")
DENSE_LIMIT = 2 << 30
_SAMPLE_SECONDS = 0.03
_PAUSE_SECONDS = 0.02


class Contender(NamedTuple):
  """Something to time.

  Attributes:
    name: in the table.
    run: runs it to its end.
    temporary_bytes: what it allocates beyond arguments and results.
    program: what it computes, the same for the same under another name.
  """

  name: str
  run: Callable[[], Any]
  temporary_bytes: int | None = None
  program: str | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
  """What was measured of a contender.

  Attributes:
    name: the contender's.
    samples: seconds, one a round.
    temporary_bytes: beyond arguments and results.
    notes: other figures by name.
  """

  name: str
  samples: tuple[float, ...] = ()
  temporary_bytes: int | None = None
  notes: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def seconds(self) -> float | None:
    """The median."""
    return statistics.median(self.samples) if self.samples else None


@dataclasses.dataclass(frozen=True)
class Row:
  """Contenders at the same task; the first is what others are compared to.

  Attributes:
    case: the task.
    direction: forward or forward+backward.
    length: T.
    entries: by contender.
    flops: of the task, where products are all of it.
  """

  case: str
  direction: str
  length: int
  entries: list[Entry]
  flops: float | None = None

  def entry(self, name: str) -> Entry | None:
    """The entry of a contender, None if it did not take part."""
    return next((each for each in self.entries if each.name == name), None)

  def ratio(self, name: str, *others: str) -> float | None:
    """The median over rounds of a time over another's, the largest of several.

    So noise alone does not make `name` look slower than the best of them.

    Args:
      name: a contender's.
      *others: those of at least one other.

    Returns:
      None if one of them did not take part.
    """
    own, *rest = (self.entry(each) for each in (name, *others))
    if own is None or None in rest:
      return None
    return max(
      statistics.median(map(operator.truediv, own.samples, other.samples))
      for other in rest
      if other
    )


class Target(NamedTuple):
  """A figure of interest, and what it should be.

  Attributes:
    section: it belongs to.
    name: what it is.
    value: as measured.
    goal: None where it is only reported.
    at_least: whether the goal is a lower bound rather than an upper one.
  """

  section: str
  name: str
  value: float
  goal: float | None = None
  at_least: bool = False

  @property
  def reached(self) -> bool | None:
    """Whether the goal is met, None without one."""
    if self.goal is None:
      return None
    met = self.value >= self.goal if self.at_least else self.value <= self.goal
    return bool(met)


class Job(NamedTuple):
  """One row, yet to be measured."""

  label: str
  run: Callable[[], Row]


def job(
  case: str,
  shape: Sequence[int],
  direction: str,
  rounds: int,
  make: Callable[[], Sequence[Contender]],
  flops: float | None = None,
) -> Job:
  """A row of times.

  Args:
    case: the task.
    shape: its last number is T.
    direction: one of `DIRECTIONS`.
    rounds: turns of each contender.
    make: the contenders.
    flops: of the task.

  Returns:
    A job that makes, times and forgets the contenders.
  """

  def run():
    entries = timed(make(), rounds)
    return Row(case, direction, shape[-1], entries, flops)

  return Job(f"{case} {direction}", run)


def compiled(
  name: str, function: Callable, arguments: Sequence, direction: str
) -> Contender:
  """A JAX function, compiled.

  Args:
    name: in the table.
    function: (*arguments) -> context.
    arguments: float arrays; each gets a gradient.
    direction: one of `DIRECTIONS`.

  Returns:
    The contender.
  """
  called, given = function, list(arguments)
  if direction != "forward":
    called = _with_gradients(function)
    given.append(cases.draw(jax.eval_shape(function, *arguments).shape, 9))
  lowered = jax.jit(called).lower(*given)
  executable = lowered.compile()
  memory = executable.memory_analysis()
  return Contender(
    name,
    lambda: jax.block_until_ready(executable(*given)),
    None if memory is None else memory.temp_size_in_bytes,
    lowered.as_text(),
  )


def _with_gradients(function):
  def value_and_gradients(*given):
    *arguments, cotangent = given
    context, pull = jax.vjp(function, *arguments)
    return context, pull(cotangent)

  return value_and_gradients


def timed(contenders: Sequence[Contender], rounds: int) -> list[Entry]:
  """Times contenders in turn, so that the machine's moods meet all of them.

  One program under several names is timed once: where its buffers lie makes it
  differ from itself by 5% and more.

  Args:
    contenders: a turn is a pause, in which the threads of the one before cease
      to spin, calls of some 30 ms, at least one, for caches to be as they will
      be, and as many calls that are timed. Who begins changes.
    rounds: turns each.

  Returns:
    Entries in the same order.
  """
  programs = {each.program or each.name: each for each in contenders}
  entries = dict(zip(programs, _timed([*programs.values()], rounds)))
  return [
    dataclasses.replace(entries[each.program or each.name], name=each.name)
    for each in contenders
  ]


def _timed(contenders, rounds):
  calls = [_calls(each.run) for each in contenders]
  samples: list[list[float]] = [[] for _ in contenders]
  faults: list[list[float]] = [[] for _ in contenders]
  for turn in range(rounds * len(contenders)):
    beginner, place = divmod(turn, len(contenders))
    n = (beginner + place) % len(contenders)
    run, count = contenders[n].run, calls[n]
    time.sleep(_PAUSE_SECONDS)
    _seconds(run, count)
    before = _page_faults()
    samples[n].append(_seconds(run, count))
    faults[n].append((_page_faults() - before) / count)
  return [
    Entry(
      contender.name,
      tuple(samples[n]),
      contender.temporary_bytes,
      {"page_faults": statistics.median(faults[n])},
    )
    for n, contender in enumerate(contenders)
  ]


def _calls(run) -> int:
  if _seconds(run, 1) > 3 * _SAMPLE_SECONDS:  # slow even the first time
    return 1
  return max(math.ceil(_SAMPLE_SECONDS / max(_seconds(run, 1), 1e-7)), 1)


def _seconds(run, count) -> float:
  begin = time.perf_counter()
  for _ in range(count):
    run()
  return (time.perf_counter() - begin) / count


def _page_faults() -> int:
  """How many pages the system has given to this process so far."""
  if resource is None:
    return 0
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def that_fit(
  contenders: Sequence[Contender], limit: int = DENSE_LIMIT
) -> list[Contender]:
  """Those whose temporaries, as far as known, are at most `limit` bytes."""
  return [c for c in contenders if (c.temporary_bytes or 0) <= limit]
