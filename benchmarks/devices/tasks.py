"""What is timed on a device, and the targets."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from benchmarks.attention import cases
from benchmarks.attention.measure import (
  DIRECTIONS,
  Contender,
  Job,
  Row,
  Target,
  job,
)
from benchmarks.devices import contenders

# Tokens of all examples together, heads and features of dot products.
TOKENS, HEADS, FEATURES = 16_384, 16, 128
# Heads of the additive score, of tokens with as many features as channels.
ADDITIVE_HEADS, CHANNELS = 8, 64
_LENGTH = 4096  # of the targets of the additive score

Skip = Callable[[str, Exception], None]


def dot_jobs(
  lengths: Sequence[int], rounds: int, skip: Skip, tokens: int = TOKENS
) -> Iterator[Job]:
  """Scaled dot products, of as many tokens for each length."""
  for length in lengths:
    shape = (max(tokens // length, 1), HEADS, length, FEATURES)
    for causal, direction in itertools.product((False, True), DIRECTIONS):
      case = f"{cases.title(shape)} {'causal' if causal else 'full'}"
      # Two products forward, and five more backward.
      times = 4 if direction == "forward" else 14
      flops = float(times * shape[0] * HEADS * length**2 * FEATURES)
      functions = functools.partial(contenders.dot, shape, causal=causal)
      make = functools.partial(_made, functions, [shape] * 3, direction, skip)
      flops = flops / 2 if causal else flops
      yield job(case, shape[:3], direction, rounds, make, flops)


def additive_jobs(
  lengths: Sequence[int], rounds: int, skip: Skip
) -> Iterator[Job]:
  """Additive attention of some heads."""
  for length, direction in itertools.product(lengths, DIRECTIONS):
    shape = (1, ADDITIVE_HEADS, length, CHANNELS)
    weights = (CHANNELS, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS,)
    shapes = [*[shape] * 3, *weights]
    make = functools.partial(
      _made, contenders.additive, shapes, direction, skip
    )
    case = f"{cases.title(shape)}, A={CHANNELS}"
    yield job(case, shape[:3], direction, rounds, make)


def _made(functions, shapes, direction: str, skip: Skip) -> list[Contender]:
  arguments = contenders.draw(*shapes)
  return [*contenders.made(functions(), arguments, direction, skip)]


def of_one_call(row: Row) -> Row:
  """A row with the times of one call, and TFLOP/s."""

  def of_entry(entry):
    samples = tuple(x / contenders.CALLS for x in entry.samples)
    entry = dataclasses.replace(entry, samples=samples)
    if row.flops is None or entry.seconds is None:
      return entry
    rate = {"tflops": row.flops / entry.seconds / 1e12}
    return dataclasses.replace(entry, notes=entry.notes | rate)

  return dataclasses.replace(row, entries=[*map(of_entry, row.entries)])


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
