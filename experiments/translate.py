r"""Translates standard input, line by line, with a run's directory alone.

    echo "Two dogs run through the snow." | \
      python -m experiments.translate --workdir=runs/multi30k

Line i of standard output belongs to line i of standard input; a blank line
stays blank. With --n_best=N each line becomes N lines of its number, a score
and a translation, between tabs.
"""

import itertools
import sys
from pathlib import Path

from absl import flags, logging

from experiments import cli
from experiments.distributed import initialize

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory.", required=True
)
_CHECKPOINT = cli.define_checkpoint()
_BEAM_SIZE, _LENGTH_PENALTY = cli.define_search()
_N_BEST = flags.DEFINE_integer(
  "n_best", 1, "Translations of a line, with scores.", lower_bound=1
)
_MIN_LENGTH = flags.DEFINE_integer(
  "min_length", 0, "Tokens a translation has at least.", lower_bound=0
)
_MAX_LENGTH = flags.DEFINE_integer(
  "max_length",
  None,
  "Tokens a translation has at most, its end included; by default half as many"
  " again as is usual for the longest line translated along with it.",
  lower_bound=1,
)
_NO_REPEAT = flags.DEFINE_integer(
  "no_repeat_ngram",
  0,
  "No n-gram of so many tokens occurs twice in a translation; 0 for no such"
  " rule.",
  lower_bound=0,
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature",
  None,
  "Above 0, draws translations instead of searching the best; below 1 likely"
  " words become likelier.",
  lower_bound=0.0,
)
_TOP_K = flags.DEFINE_integer(
  "top_k", None, "Draws from so many of the likeliest; 0: all.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", None, "Of the drawing.", lower_bound=0)
_LONG_LINES = flags.DEFINE_enum(
  "long_lines",
  "cut",
  ["cut", "refuse"],
  "What to do with a line that is longer than the model reads.",
)
_ALIGNMENTS = flags.DEFINE_string(
  "alignments",
  None,
  "Folder for pictures of where each translation looked, and the weights as"
  " .npz.",
)
_BLOCK = 4096  # lines read before any is translated
_UNKNOWN = 10  # lines with unknown characters that are named


def main() -> None:
  """Translates, as the flags say."""
  workdir = Path(_WORKDIR.value)
  initialize.set_up_jax()
  from experiments.data.text.readers import decode_lines
  from experiments.inference import restored, translator
  from experiments.progress import counting

  finished = restored.restore(workdir, _CHECKPOINT.value)
  search = restored.configured_search(
    finished.run,
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
  if _ALIGNMENTS.value:
    Path(_ALIGNMENTS.value).mkdir(parents=True, exist_ok=True)
  translate = translator.make_translator(
    finished,
    search,
    refuse_long=_LONG_LINES.value == "refuse",
    alignments=_ALIGNMENTS.value is not None,
  )
  size = 1 if sys.stdin.isatty() else _BLOCK
  source = decode_lines(sys.stdin.buffer, "standard input")
  number = unknown = 0
  with counting("lines") as progress:
    while block := list(itertools.islice(source, size)):
      lines = translate(block, first=number + 1, progress=progress)
      for line in lines:
        number += 1
        _write(line, number)
        if line.cut:
          logging.warning("%s", line.cut)
        if line.unknown and unknown < _UNKNOWN:
          logging.warning("%s", line.unknown)
        unknown += bool(line.unknown)
        if _ALIGNMENTS.value:
          translator.save_looks(line, number, Path(_ALIGNMENTS.value))
      sys.stdout.flush()
  if unknown > _UNKNOWN:
    logging.warning(
      "and %d more lines with characters never seen", unknown - _UNKNOWN
    )


def _write(line, number: int) -> None:
  if _N_BEST.value == 1:
    print(line.texts[0])
    return
  for score, text in zip(line.scores, line.texts):
    print(number, f"{score:.4f}", text, sep="\t")


if __name__ == "__main__":
  cli.run(main)
