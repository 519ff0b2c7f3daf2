"""The sections of the table, in their order."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.attention import (
  accuracy,
  cases,
  curves,
  heads,
  memory,
  scaled_dot,
  timings,
  variants,
)
from benchmarks.attention.measure import Job, Row, Target


class Section(NamedTuple):
  """A part of the benchmark: its jobs, its targets, and derived figures."""

  jobs: Callable[[cases.Grid, int], list[Job]]
  targets: Callable[[Sequence[Row]], list[Target]]
  complete: Callable[[Sequence[Row]], list[Row]] = list


# The names are those of `settings.SECTIONS`.
SECTIONS = {
  "dot": Section(
    scaled_dot.dot_jobs, scaled_dot.dot_targets, scaled_dot.with_rates
  ),
  "odd": Section(scaled_dot.odd_jobs, scaled_dot.odd_targets),
  "small": Section(scaled_dot.small_jobs, scaled_dot.small_targets),
  "causal": Section(timings.causal_jobs, timings.causal_targets),
  "window": Section(timings.window_jobs, timings.window_targets),
  "additive": Section(timings.additive_jobs, timings.additive_targets),
  "projected": Section(timings.projected_jobs, timings.projected_targets),
  "closure": Section(timings.closure_jobs, timings.closure_targets),
  "normalizers": Section(variants.normalizer_jobs, variants.normalizer_targets),
  "positional": Section(variants.positional_jobs, variants.positional_targets),
  "memory": Section(memory.jobs, memory.targets),
  "accuracy": Section(accuracy.jobs, accuracy.targets),
  "curves": Section(curves.jobs, curves.targets),
  "heads": Section(heads.jobs, heads.targets),
}
