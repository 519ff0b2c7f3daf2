r"""Writes a page that shows the attention weights of trained runs.

    python -m experiments.explore --workdir=runs/numbers --out=page.html
    python -m experiments.explore --workdir=runs/numbers \
        --workdir=runs/numbers-transformer --source=lines.en --out=page.html

The page is one file without references to others, which a browser opens from
disk. It shows the weights of every layer and head as lines and as a heat map,
of all runs side by side.
"""

from pathlib import Path

from absl import flags, logging

from experiments import cli
from experiments.config import TaskConfig
from experiments.distributed import initialize
from experiments.errors import UserError, counted
from experiments.run_directory import check_writable, run_path

_WORKDIRS = flags.DEFINE_multi_string(
  "workdir",
  None,
  "The run directory, or its URL (gs://, s3://, az:// or hf://); give the flag"
  " again to show several runs side by side.",
  required=True,
)
_CHECKPOINT = cli.define_checkpoint()
_SOURCE = flags.DEFINE_string(
  "source",
  None,
  "A file of source lines; by default, lines of the first run's validation"
  " set.",
)
_TARGET = flags.DEFINE_string(
  "target",
  None,
  "A file with the target of each line of --source; by default, the greedy"
  " translations.",
)
_OUT = flags.DEFINE_string("out", None, "The page to write.", required=True)
_NUM_SENTENCES = flags.DEFINE_integer(
  "num_sentences",
  8,
  "Largest number of sentences in the page, which holds all weights.",
  lower_bound=1,
)


def main() -> None:
  """Writes the page that the flags describe."""
  initialize.set_up_jax()
  from experiments.inference import Run, restore
  from experiments.visualization.attention_view import attention_view

  out = Path(_OUT.value)
  if out.is_dir():
    raise UserError(f"--out={out}: is a folder; give the name of a page")
  check_writable(out, flag="out")
  runs = [
    Run(restore(run_path(workdir), _CHECKPOINT.value), workdir)
    for workdir in _WORKDIRS.value
  ]
  _check_tasks(runs)
  pairs = []
  for source, target in _lines(runs[0]):
    pairs += [_attention(run, source, target) for run in runs]
  view = attention_view(*pairs)
  view.save(out)
  logging.info("%s: %s", out, counted(view.num_sentences, "sentence"))


def _attention(run, source: str, target: str | None):
  """Returns the weights of a pair; an error names the file and the source."""
  try:
    return run.attention(source, target)
  except UserError as error:
    # Of one line.
    reason = str(error).removeprefix("source ").removeprefix("line 1: ")
    place = f"--source={_SOURCE.value}" if _SOURCE.value else run.name
    raise UserError(f"{place}, {source!r}: {reason}") from error


def _check_tasks(runs) -> None:
  """Raises UserError if one run is of text and another of a synthetic task."""
  for run in runs[1:]:
    both = [each.config.data for each in (runs[0], run)]
    if len({isinstance(data, TaskConfig) for data in both}) > 1:
      raise UserError(
        f"--workdir: the runs have different tasks: {runs[0].name} has"
        f" {both[0].name}, {run.name} has {both[1].name}; show them in two"
        " pages"
      )


def _lines(run) -> list[tuple[str, str | None]]:
  """Returns source lines and their targets; None for a translation."""
  from experiments.data.text import readers

  if _SOURCE.value is None:
    if _TARGET.value is not None:
      raise UserError("--target needs --source, the file of its source lines")
    return [(line, None) for line in run.example_lines(_NUM_SENTENCES.value)]
  path, lines = Path(_SOURCE.value), list[tuple[str, str | None]]()
  if _TARGET.value is None:
    lines += [
      (line, None) for line in readers.read_lines(path, field="--source")
    ]
  else:
    fields = "--source", "--target"
    lines += zip(*readers.read_pair(path, Path(_TARGET.value), fields=fields))
  pairs = [*dict.fromkeys(line for line in lines if line[0].strip())]
  if not pairs:
    raise UserError(f"--source={_SOURCE.value}: has no text")
  shown = pairs[: _NUM_SENTENCES.value]
  if len(shown) < len(pairs):
    logging.warning(
      "the page shows %d of %d lines; raise --num_sentences for more",
      len(shown),
      len(pairs),
    )
  return shown


if __name__ == "__main__":
  cli.run(main)
