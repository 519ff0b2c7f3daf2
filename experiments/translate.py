r"""Translates standard input, line by line, with a trained run.

    echo "Two dogs run through the snow." | \
      python -m experiments.translate --workdir=runs/multi30k

Line i of standard output is the translation of line i of standard input; a
blank line stays blank. With --n_best=N each line gives N lines: line number,
score and translation, separated by tabs.

    python -m experiments.translate --workdir=runs/multi30k \
      --source=corpus.en --out=corpus.de

Translates a file of any size in constant memory. If it is stopped, the same
command continues after the last 4,096 lines that were written; SIGTERM and
Ctrl-C stop it after a batch, with exit code 75.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from absl import flags, logging

from experiments import cli
from experiments.distributed import initialize
from experiments.errors import StoppedError, UserError, counted
from experiments.run_directory import is_remote, run_path

_WORKDIR, _CHECKPOINT = cli.define_run()
_BEAM_SIZE, _LENGTH_PENALTY = cli.define_search()
_N_BEST = flags.DEFINE_integer(
  "n_best",
  1,
  "Number of translations of each line; above 1, scores are printed too.",
  lower_bound=1,
)
_MIN_LENGTH = flags.DEFINE_integer(
  "min_length", 0, "Minimum number of tokens of a translation.", lower_bound=0
)
_MAX_LENGTH = flags.DEFINE_integer(
  "max_length",
  None,
  "Maximum number of tokens of a translation, end of sentence included; by"
  " default 1.5 times the average length of a target for the longest source of"
  " the batch.",
  lower_bound=1,
)
_NO_REPEAT = flags.DEFINE_integer(
  "no_repeat_ngram",
  0,
  "Size of the n-grams that must not occur twice in a translation; 0 allows"
  " all repetitions.",
  lower_bound=0,
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature",
  None,
  "Above 0, translations are sampled from softmax(logits / temperature); by"
  " default decoding is greedy or by beam search.",
  lower_bound=0.0,
)
cli.check_finite("temperature", at_least=1e-4)
_TOP_K = flags.DEFINE_integer(
  "top_k", None, "Samples from the k most likely tokens; 0: all.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", None, "Seed of sampling.", lower_bound=0)
_LONG_LINES = flags.DEFINE_enum(
  "long_lines",
  "cut",
  ["cut", "refuse"],
  "Truncates (cut) or rejects (refuse) lines above the model's maximum length.",
)
_SOURCE = flags.DEFINE_string(
  "source",
  None,
  "File to translate, plain or .gz; by default standard input.",
)
_OUT = flags.DEFINE_string(
  "out",
  None,
  "File for the translations of --source; by default standard output. Until it"
  " is complete, it has a hidden name, from which a restart continues, unless"
  " --source is a pipe.",
)
_ALIGNMENTS = flags.DEFINE_string(
  "alignments",
  None,
  "Folder for attention weights of translations: a figure and an .npz file per"
  " line, and index.html, an interactive page of the first 32 different lines.",
)
_SHOWN = 32  # lines in index.html
_BLOCK = 4096  # lines read and translated together
_UNKNOWN = 10  # warnings about unknown characters; the rest are counted


def main() -> None:
  """Translates standard input or a file with the run that the flags name."""
  if _OUT.value and not _SOURCE.value:
    raise UserError(
      "--out: needs --source, the file that a restart reads again"
    )
  if _ALIGNMENTS.value and Path(_ALIGNMENTS.value).is_file():
    raise UserError(
      f"--alignments={_ALIGNMENTS.value}: is a file; give the name of a folder"
    )
  initialize.set_up_jax()
  from experiments import inference
  from experiments.data.text import readers

  restored = inference.restore(run_path(_WORKDIR.value), _CHECKPOINT.value)
  search = _search(restored)
  translate = inference.make_translator(
    restored,
    search,
    refuse_long=_LONG_LINES.value == "refuse",
    source=_SOURCE.value or "",
  )
  with contextlib.ExitStack() as stack:
    stream: BinaryIO = sys.stdin.buffer
    if _SOURCE.value:
      name = f"--source={_SOURCE.value}"
      stream = readers.open_bytes(Path(_SOURCE.value), name)
      stack.enter_context(stream)
    output = stack.enter_context(contextlib.closing(_output(restored, search)))
    check = stack.enter_context(_stopping(output))
    save = _make_save(restored, is_restart=output.num_groups > 0)
    _translate_all(stream, output, translate, save, check)
    output.finish()


@contextlib.contextmanager
def _stopping(output) -> Iterator[Callable[[], None]]:
  """Yields a function that stops the process if it has received a signal."""
  from experiments.distributed import preemption

  if not (_OUT.value and _file()):  # a signal stops the process at once
    yield lambda: None
    return
  with preemption.listen(unit="batch") as signals:

    def check() -> None:
      if signals.should_stop(output.num_lines):
        raise StoppedError(
          f"stopped after {output.num_lines} lines; the same command continues"
        )

    yield check


def _translate_all(stream, output, translate, save, check) -> None:
  """Translates the lines of a stream that the output does not have yet."""
  from experiments.data.text import readers
  from experiments.progress import counting, without_bars

  typed = stream.isatty()
  size = 1 if typed else _BLOCK
  total = readers.num_lines(file) if (file := _file()) else None
  done, unknown = output.num_groups, 0
  source = readers.decode_lines(stream, _SOURCE.value or "standard input")
  source = itertools.islice(source, done, None)
  first = done + 1
  with counting("line", total=total, initial=done, hidden=typed) as count:

    def progress(lines: int) -> None:
      count(lines)
      check()

    while block := list(itertools.islice(source, size)):
      lines = translate(block, first=first, progress=progress)
      for number, line in enumerate(lines, start=first):
        save(line, number, block[number - first])
        check()
      with without_bars():
        for line in lines:
          if line.cut:
            logging.warning("%s", line.cut)
          if line.unknown and unknown < _UNKNOWN:
            logging.warning("%s", line.unknown)
          unknown += bool(line.unknown)
        output.write(
          text
          for number, line in enumerate(lines, start=first)
          for text in _formatted(line, number)
        )
      first += len(block)
  if unknown > _UNKNOWN:
    logging.warning(
      "and %s with characters that are not in the training text",
      counted(unknown - _UNKNOWN, "more line"),
    )


def _file() -> Path | None:
  """The file of --source; None for a pipe, which can be read only once."""
  source = Path(_SOURCE.value or "")
  return source if source.is_file() else None


def _output(restored, search):
  """Returns standard output, or the file of --out, which may be begun."""
  from experiments.inference.output import PartialFile, StandardOutput

  if not (_OUT.value and _SOURCE.value):
    return StandardOutput()
  workdir, out, file = run_path(_WORKDIR.value), Path(_OUT.value), _file()
  settings: dict[str, Any] = {
    "workdir": str(workdir if is_remote(workdir) else workdir.resolve()),
    "checkpoint": restored.checkpoint,
    "search": repr(search),
    "source": _SOURCE.value,
  }
  if file:
    source, state = file.resolve(), file.stat()
    settings["source"] = [str(source), state.st_size, state.st_mtime_ns]
  return PartialFile(out, settings, _N_BEST.value, continues=file is not None)


def _search(restored):
  from experiments.evaluation.search import configured_search

  return configured_search(
    restored.experiment,
    beam_size=_BEAM_SIZE.value,
    length_penalty=_LENGTH_PENALTY.value,
    n_best=_N_BEST.value,
    min_length=_MIN_LENGTH.value,
    max_length=_MAX_LENGTH.value,
    no_repeat_ngram=_NO_REPEAT.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    seed=_SEED.value,
  )


def _make_save(restored, *, is_restart: bool):
  """Makes a function that writes a line's attention weights, if requested."""
  if not _ALIGNMENTS.value:
    return lambda line, number, text: None
  from experiments.visualization.alignments import make_pair_weights, save_pair
  from experiments.visualization.attention_view import attention_view

  folder = Path(_ALIGNMENTS.value)
  folder.mkdir(parents=True, exist_ok=True)
  page, shown = folder / "index.html", dict[str, Any]()
  # The first lines are in the page of the process that was stopped.
  is_complete = is_restart and page.exists()

  def save(line, number, text):
    if not len(line.source):  # blank
      return
    text = " ".join(text.split())
    pair = make_pair_weights(
      restored.experiment,
      restored.params,
      line.source,
      line.tokens,
      run=_WORKDIR.value,
      text=text,
      translation=line.texts[0],
    )
    save_pair(pair, folder / f"{number:06d}")
    if not is_complete and len(shown) < _SHOWN and text not in shown:
      shown[text] = pair
      attention_view(*shown.values()).save(page)

  return save


def _formatted(line, number: int) -> Iterator[str]:
  if _N_BEST.value == 1:
    yield line.texts[0]
    return
  for score, text in zip(line.scores, line.texts):
    yield f"{number}\t{score:.4f}\t{text}"


if __name__ == "__main__":
  cli.run(main)
