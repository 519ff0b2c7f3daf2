r"""Compiles attention and the experiments for accelerators; runs nothing.

    pip install -e '.[experiments,aot-tpu,aot-cuda]'
    python -m benchmarks.accelerators --target=h100,v5e
    python -m benchmarks.accelerators --target=v5e --only=attention/additive
    python -m benchmarks.accelerators --target=v5e --full --workers=2
    python -m benchmarks.accelerators --again --json=/tmp/figures

Counts kernels, bytes through device memory, temporaries and collectives in the
compiled programs. Writes docs/results/accelerators-TARGET.json and the table of
docs/compiled_programs.md, or the JSON to another folder. The default subset
takes about half an hour for each target on two cores, --full several hours. A
run that was stopped continues: cases with a result are skipped unless --again
is given. A failure is recorded and does not end the run.
"""

import multiprocessing.pool
import os
import pathlib
import queue

from absl import flags
from tqdm import tqdm

from benchmarks.accelerators import cases, report
from benchmarks.accelerators.worker import Worker
from experiments import cli
from experiments.aot.targets import TARGETS
from experiments.errors import UserError

_TARGET = flags.DEFINE_list(
  "target", ["h100", "v5e"], f"The targets: {', '.join(TARGETS)}."
)
_ONLY = flags.DEFINE_list(
  "only", [], "Beginnings of the names of cases; by default the subset."
)
_FULL = flags.DEFINE_bool("full", False, "Compile all cases.")
_AGAIN = flags.DEFINE_bool("again", False, "Replace earlier results.")
_LIST = flags.DEFINE_bool(
  "list", False, "Print the names of all cases, or of those of --only."
)
_WORKERS = flags.DEFINE_integer(
  "workers", 1, "Cases that are compiled at a time.", lower_bound=1
)
_SECONDS = flags.DEFINE_float(
  "seconds", 900.0, "The time after which a case fails.", lower_bound=1.0
)
_JSON = flags.DEFINE_string(
  "json",
  "docs/results",
  "The folder of the JSON. docs/compiled_programs.md has the table of the"
  " default folder, and is not changed for another one.",
)


@flags.validator("target", f"the targets are {', '.join(TARGETS)}")
def _known(targets) -> bool:
  return bool(targets) and set(targets) <= set(TARGETS)


def _path(target: str) -> pathlib.Path:
  return pathlib.Path(_JSON.value) / f"accelerators-{target}.json"


def _without_results(
  target: str, names: list[str], results: report.Results
) -> list[str]:
  """The cases that have to be compiled."""
  missing = [name for name in names if name not in results]
  if _AGAIN.value or len(missing) == len(names):
    return names
  print(
    f"{target}: {len(names) - len(missing)} of {len(names)} cases have results"
    f" in {_path(target)}; --again compiles them too"
  )
  return missing


def _run(target: str, names: list[str]) -> None:
  """Compiles cases and writes each result."""
  results = report.read(_path(target))
  names = _without_results(target, names, results)
  workers = [Worker(target) for _ in range(_WORKERS.value)]
  free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
  for worker in workers:
    free.put(worker)

  def compiled(name):
    worker = free.get()
    try:
      return name, worker.compile(name, _SECONDS.value)
    finally:
      free.put(worker)

  try:
    with (
      multiprocessing.pool.ThreadPool(len(workers)) as pool,
      tqdm(total=len(names), desc=target, dynamic_ncols=True) as bar,
    ):
      for name, result in pool.imap_unordered(compiled, names):
        results[name] = result
        report.write(_path(target), target, results)
        bar.write(report.line(f"{target} {name}", result))
        bar.update()
  finally:
    for worker in workers:
      worker.close()


def main() -> None:
  """Compiles the cases for all targets."""
  # The compilers are used, but no device is.
  os.environ["JAX_PLATFORMS"] = "cpu"
  known = cases.all_cases()
  try:
    names = cases.selected(known, _ONLY.value, full=_FULL.value)
  except ValueError as error:
    raise UserError(str(error)) from None
  if _LIST.value:
    print("\n".join(names if _ONLY.value else known))
    return
  for target in _TARGET.value:
    TARGETS[target].check_installed()
  for target in _TARGET.value:
    _run(target, cases.for_target(known, names, TARGETS[target]))
  if not flags.FLAGS["json"].using_default_value:
    return
  found = {target: report.read(_path(target)) for target in TARGETS}
  report.write_document(
    pathlib.Path("docs/compiled_programs.md"), report.tables(found)
  )


if __name__ == "__main__":
  cli.run(main)
