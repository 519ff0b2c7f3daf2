"""What is timed on a device, and the targets."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from benchmarks.attention.measure import (
  Contender,
  Entry,
  Job,
  Row,
  Target,
  timed,
)
from benchmarks.devices import contenders

# Tokens of all examples together, heads and features of dot products.
TOKENS, HEADS, FEATURES = 16_384, 16, 128
# Heads of the additive score, of tokens with as many features as channels.
ADDITIVE_HEADS, CHANNELS = 8, 64
_LENGTH = 4096  # of the targets of the additive score
_DIRECTIONS = ("forward", "forward+backward")

Skip = Callable[[str, Exception], None]


def dot_jobs(
  lengths: Sequence[int], rounds: int, skip: Skip, tokens: int = TOKENS
) -> Iterator[Job]:
  """Scaled dot products, of as many tokens for each length."""
  for length in lengths:
    shape = (max(tokens // length, 1), HEADS, length, FEATURES)
    arguments = functools.partial(contenders.draw, *[shape] * 3)
    for causal in (False, True):
      functions = functools.partial(contenders.dot, shape, causal=causal)
      case = f"{' x '.join(map(str, shape))} {'causal' if causal else 'full'}"
      for direction in _DIRECTIONS:
        # Two products forward, and five more backward.
        times = 4 if direction == "forward" else 14
        flops = times * shape[0] * HEADS * length**2 * FEATURES
        make = _Make(functions, arguments, direction, skip)
        yield _job(case, length, rounds, make, flops / 2 if causal else flops)


def additive_jobs(
  lengths: Sequence[int], rounds: int, skip: Skip
) -> Iterator[Job]:
  """Additive attention of some heads."""
  for length in lengths:
    shape = (1, ADDITIVE_HEADS, length, CHANNELS)
    weights = [(CHANNELS, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS,)]
    arguments = functools.partial(contenders.draw, *[shape] * 3, *weights)
    functions = functools.partial(contenders.additive, shape)
    case = f"{' x '.join(map(str, shape))}, A = {CHANNELS}"
    for direction in _DIRECTIONS:
      make = _Make(functions, arguments, direction, skip)
      yield _job(case, length, rounds, make)


class _Make(NamedTuple):
  """What makes the contenders of a row."""

  functions: Callable[[], dict[str, Callable]]
  arguments: Callable[[], Sequence[jax.Array]]
  direction: str
  skip: Skip

  def __call__(self) -> list[Contender]:
    return [
      *contenders.made(
        self.functions(),
        self.arguments(),
        gradient=self.direction != "forward",
        skip=self.skip,
      )
    ]


def _job(
  case: str,
  length: int,
  rounds: int,
  make: _Make,
  flops: float | None = None,
) -> Job:
  """The times of one call of each contender."""

  def run():
    entries = [_of_one_call(each, flops) for each in timed(make(), rounds)]
    return Row(case, make.direction, length, entries, flops)

  return Job(f"{case} {make.direction}", run)


def _of_one_call(entry: Entry, flops: float | None) -> Entry:
  samples = tuple(x / contenders.CALLS for x in entry.samples)
  entry = dataclasses.replace(entry, samples=samples)
  if flops is None or entry.seconds is None:
    return entry
  rate = {"tflops": flops / entry.seconds / 1e12}
  return dataclasses.replace(entry, notes=entry.notes | rate)


def dot_targets(rows: Sequence[Row]) -> list[Target]:
  """The time of `attend` and of the kernels, beside cuDNN called directly."""
  found = []
  for name in ("dispatched", "pallas"):
    ratios = [
      ratio for row in rows if (ratio := row.ratio(name, "cudnn")) is not None
    ]
    if ratios:
      what = f"{name} / cudnn, the largest of {len(ratios)}"
      found.append(Target("dot", what, max(ratios), 1.05))
  return found


def additive_targets(rows: Sequence[Row]) -> list[Target]:
  """Milliseconds a head, and the times of PyTorch divided by ours."""
  found = []
  for row in rows:
    own = row.entry("pallas")
    if own is None or own.seconds is None:
      continue
    if row.length == _LENGTH:
      what = f"{row.direction}: pallas, ms a head at {_LENGTH:,}"
      goal = 0.36 if row.direction == "forward" else 1.2
      value = 1e3 * own.seconds / ADDITIVE_HEADS
      found.append(Target("additive", what, value, goal))
    for name in ("torch plain", "torch compiled"):
      ratio = row.ratio(name, "pallas")
      if ratio is not None:
        what = f"{row.case} {row.direction}: {name} / pallas"
        found.append(Target("additive", what, ratio, 10.0, at_least=True))
  return found
