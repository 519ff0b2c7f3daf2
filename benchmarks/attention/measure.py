"""Compiles contenders ahead of time, and times them in turn."""

import dataclasses
import functools
import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

try:
  import resource
except ImportError:  # not on Windows
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
    run: calls it and waits for the result.
    temporary_bytes: memory it allocates beyond arguments and results.
    program: its code; equal programs under several names are timed once.
  """

  name: str
  run: Callable[[], Any]
  temporary_bytes: int | None = None
  program: str | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
  """The measurements of a contender.

  Attributes:
    name: the contender's.
    samples: seconds, one for each round.
    temporary_bytes: beyond arguments and results.
    notes: other measurements by name.
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
  """Contenders for the same task; the first is the baseline.

  Attributes:
    case: the task.
    direction: forward or forward+backward.
    length: T.
    entries: by contender.
    flops: of the task, if it consists of matrix products.
  """

  case: str
  direction: str
  length: int
  entries: list[Entry]
  flops: float | None = None

  def entry(self, name: str) -> Entry | None:
    """The entry of a contender; None if it has none."""
    return next((each for each in self.entries if each.name == name), None)

  def ratio(self, name: str, *others: str) -> float | None:
    """The median over rounds of a time divided by another contender's.

    The largest ratio for several others, so that the fastest is compared; None
    if one of them has no entry.
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
  """A measured value and its goal; a goal of None is only reported.

  The goal is an upper bound, or with `at_least` a lower bound.
  """

  section: str
  name: str
  value: float
  goal: float | None = None
  at_least: bool = False

  @property
  def reached(self) -> bool | None:
    """Whether the goal is met; None without a goal."""
    if self.goal is None:
      return None
    met = self.value >= self.goal if self.at_least else self.value <= self.goal
    return bool(met)


class Job(NamedTuple):
  """A row that is not measured yet."""

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
  """A job that makes and times contenders; the last of `shape` is T."""

  def run():
    entries = timed(make(), rounds)
    return Row(case, direction, shape[-1], entries, flops)

  return Job(f"{case} {direction}", run)


def by_direction(
  case: str,
  shape: Sequence[int],
  rounds: int,
  make: Callable[[str], Sequence[Contender]],
) -> list[Job]:
  """A job for each direction, of which `make` makes the contenders."""
  return [
    job(case, shape, direction, rounds, functools.partial(make, direction))
    for direction in DIRECTIONS
  ]


def compiled(
  name: str,
  function: Callable,
  arguments: Sequence,
  direction: str,
  calls: int = 1,
) -> Contender:
  """Compiles a JAX function; each of the arguments gets a gradient.

  With several `calls` they wait in the device's queue together.
  """
  called, given = function, list(arguments)
  if direction != "forward":
    called = _with_gradients(function)
    context = jax.eval_shape(function, *arguments)
    given.append(cases.draw(context.shape, 9).astype(context.dtype))
  lowered = jax.jit(called).lower(*given)
  executable = lowered.compile()
  memory = executable.memory_analysis()

  def run():
    results = [executable(*given) for _ in range(calls)]
    return jax.block_until_ready(results)[-1]

  return Contender(
    name,
    run,
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
  """Times contenders in turn, so that drifts of the machine affect all alike.

  A turn is a pause, in which the previous contender's threads stop spinning;
  calls of about 30 ms, at least one, to warm the caches; and as many calls that
  are timed. The first contender of a round changes. Equal programs are timed
  once: buffer addresses alone make the times of a program differ by 5%.
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
    first, position = divmod(turn, len(contenders))
    n = (first + position) % len(contenders)
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
  """The page faults of this process so far."""
  if resource is None:
    return 0
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def that_fit(
  contenders: Sequence[Contender], limit: int = DENSE_LIMIT
) -> list[Contender]:
  """The contenders with at most `limit` bytes of temporaries, if known."""
  return [c for c in contenders if (c.temporary_bytes or 0) <= limit]
