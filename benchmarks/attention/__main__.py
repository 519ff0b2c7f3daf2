"""Compares `attend` with other implementations: time, memory, accuracy.

    python -m benchmarks.attention [--quick] [--only=dot,causal] [--rounds=7]
        [--json=FILE] [--figures=DIR]

Prints a table of results and a table of targets; --json writes both as JSON,
and --figures draws time and memory against the length. PyTorch and attnax are
included where they are installed: `pip install -e '.[bench]'`. All sections
take a quarter of an hour on two cores, one section a few minutes.
"""

import pathlib

from absl import flags
from tqdm import tqdm

from benchmarks.attention import settings
from experiments import cli

_ROUNDS = flags.DEFINE_integer(
  "rounds",
  7,
  "Timings of each implementation, taken in turn; at most 3 for curves.",
  lower_bound=1,
)
_JSON = flags.DEFINE_string(
  "json",
  None,
  "The JSON file of results, such as docs/results/attention.json; it is"
  " replaced, with the sections of --only. By default none is written.",
)
_FIGURES = flags.DEFINE_string(
  "figures",
  None,
  "The directory of the figures, such as docs/results: attention_time.png and"
  " attention_memory.png (by curves), heads_time.png and heads_memory.png (by"
  " heads), sliding_window.png (by window). By default none is drawn.",
)
_ONLY = flags.DEFINE_list(
  "only", list(settings.SECTIONS), "The sections to run."
)
_QUICK = flags.DEFINE_bool("quick", False, "Use tiny shapes, as a smoke test.")
_KEEP_MEMORY = flags.DEFINE_bool(
  "keep_memory",
  True,
  "Let the allocator keep memory between calls; this restarts the process "
  "(glibc only).",
)


@flags.validator("only", f"the sections are {', '.join(settings.SECTIONS)}")
def _known(sections) -> bool:
  return bool(sections) and set(sections) <= set(settings.SECTIONS)


def _run(jobs_by_section) -> dict:
  """Runs all jobs, with a progress bar."""
  rows: dict = {section: [] for section in jobs_by_section}
  total = sum(map(len, jobs_by_section.values()))
  with tqdm(total=total, dynamic_ncols=True) as bar:
    for section, jobs in jobs_by_section.items():
      for job in jobs:
        bar.set_postfix_str(f"{section}: {job.label}")
        rows[section].append(job.run())
        bar.update()
  return rows


def main() -> None:
  """Runs the sections; prints, writes and draws the results."""
  if _KEEP_MEMORY.value:
    settings.restart_keeping_memory()
  # Imported after the restart: they import JAX, PyTorch and Matplotlib.
  from benchmarks.attention import cases, figures, peers, report, sections

  grid = cases.QUICK if _QUICK.value else cases.Grid()
  machine = settings.machine()
  options = {
    "rounds": _ROUNDS.value,
    "quick": _QUICK.value,
    "allocator": settings.allocator(),
  }
  print(
    *peers.versions(),
    f"allocator: {options['allocator']}",
    settings.load_line(machine["load"]),
    sep="\n",
    flush=True,
  )
  selected = {
    name: section
    for name, section in sections.SECTIONS.items()
    if name in _ONLY.value
  }
  rows = _run(
    {name: each.jobs(grid, _ROUNDS.value) for name, each in selected.items()}
  )
  rows = {name: each.complete(rows[name]) for name, each in selected.items()}
  targets = [
    target
    for name, each in selected.items()
    for target in each.targets(rows[name])
  ]
  print("", report.table(rows), "", report.targets_table(targets), sep="\n")
  written = []
  if _JSON.value:
    written.append(pathlib.Path(_JSON.value))
    report.write(written[0], machine, options, rows, targets)
  if _FIGURES.value:
    written += figures.save(rows, pathlib.Path(_FIGURES.value), grid)
  print("", *(f"wrote {path}" for path in written), sep="\n")


if __name__ == "__main__":
  cli.run(main)
