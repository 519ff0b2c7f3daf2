"""`attend` against its peers: time, memory, accuracy.

    python -m benchmarks.attention [--quick] [--only=dot,causal] [--rounds=7]

Prints a table and which targets are reached, writes them as JSON, and draws
time and memory against the length. PyTorch and attnax take part where they are
installed: `pip install -e '.[bench]'`. All of it takes tens of minutes on two
cores; one section alone a few.
"""

import pathlib
import sys

from absl import app, flags
from tqdm import tqdm

from benchmarks.attention import settings

_ROUNDS = flags.DEFINE_integer(
  "rounds",
  7,
  "How often each contender is timed, in turn; at most 3 in curves.",
  lower_bound=1,
)
_JSON = flags.DEFINE_string(
  "json",
  "docs/results/attention.json",
  "The file to write all figures to; it is replaced, with what --only chose.",
)
_FIGURES = flags.DEFINE_string(
  "figures",
  "docs/results",
  "The folder to draw in: attention_time.png and attention_memory.png (by "
  "curves), heads_time.png and heads_memory.png (by heads), sliding_window.png "
  "(by window).",
)
_ONLY = flags.DEFINE_list(
  "only", list(settings.SECTIONS), "The sections to run."
)
_QUICK = flags.DEFINE_bool(
  "quick", False, "Tiny shapes, to see in seconds that it works."
)
_KEEP_MEMORY = flags.DEFINE_bool(
  "keep_memory",
  True,
  "Let the allocator keep memory between calls, which needs a restart of the "
  "process (glibc only).",
)


@flags.validator("only", f"the sections are {', '.join(settings.SECTIONS)}")
def _known(sections) -> bool:
  return bool(sections) and set(sections) <= set(settings.SECTIONS)


def _run(jobs_by_section) -> dict:
  """Runs all jobs, telling how far it is on standard error."""
  total = sum(map(len, jobs_by_section.values()))
  watched = sys.stderr.isatty()
  rows: dict = {}
  done = 0
  with tqdm(total=total, disable=not watched, dynamic_ncols=True) as bar:
    for section, jobs in jobs_by_section.items():
      rows[section] = []
      for job in jobs:
        bar.set_postfix_str(f"{section}: {job.label}")
        rows[section].append(job.run())
        bar.update()
        done += 1
        if not watched:
          said = f"{done}/{total} {section}: {job.label}"
          print(said, file=sys.stderr, flush=True)
  return rows


def main(arguments) -> None:
  """Measures, prints, writes and draws."""
  if len(arguments) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(arguments[1:])}")
  if _KEEP_MEMORY.value:
    settings.restart_keeping_memory()
  # Not before the restart: these import JAX, PyTorch and Matplotlib.
  from benchmarks.attention import cases, peers, pictures, report, sections

  grid = cases.QUICK if _QUICK.value else cases.Grid()
  machine = settings.machine()
  options = {
    "rounds": _ROUNDS.value,
    "quick": _QUICK.value,
    "allocator": settings.allocator(),
  }
  print(
    *peers.lines(),
    f"allocator: {options['allocator']}",
    settings.load_line(machine["load"]),
    sep="\n",
    flush=True,
  )
  chosen = {
    name: section
    for name, section in sections.SECTIONS.items()
    if name in _ONLY.value
  }
  rows = _run(
    {name: each.jobs(grid, _ROUNDS.value) for name, each in chosen.items()}
  )
  rows = {name: each.complete(rows[name]) for name, each in chosen.items()}
  targets = [
    target
    for name, each in chosen.items()
    for target in each.targets(rows[name])
  ]
  print("", report.table(rows), "", report.targets_table(targets), sep="\n")
  written = [pathlib.Path(_JSON.value)]
  report.write(written[0], machine, options, rows, targets)
  folder = pathlib.Path(_FIGURES.value)
  if "curves" in rows:
    written += pictures.save_curves(
      rows["curves"], folder, "attention", "one head of 64"
    )
  if "heads" in rows:
    written += pictures.save_curves(
      rows["heads"], folder, "heads", f"a layer, {max(grid.heads):,} tokens"
    )
  if "window" in rows:
    written += pictures.save_window(rows["window"], folder, grid.window_size)
  print("", *(f"wrote {path}" for path in written), sep="\n")


if __name__ == "__main__":
  app.run(main)
