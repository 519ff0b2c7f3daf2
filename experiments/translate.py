r"""Translates standard input, line by line, with a trained run.

    echo "Two dogs run through the snow." | \
      python -m experiments.translate --workdir=runs/multi30k

Line i of standard output is the translation of line i of standard input; a
blank line stays blank. With --n_best=N each line gives N lines: line number,
score and translation, separated by tabs.
"""

import itertools
import sys
from pathlib import Path

from absl import flags, logging

from experiments import cli
from experiments.distributed import initialize

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
_ALIGNMENTS = flags.DEFINE_string(
  "alignments",
  None,
  "Folder for attention weights of translations, as figures and .npz files.",
)
_BLOCK = 4096  # lines read and translated together
_UNKNOWN = 10  # warnings about unknown characters; the rest are counted


def main() -> None:
  """Translates standard input with the run that the flags name."""
  workdir = Path(_WORKDIR.value)
  initialize.set_up_jax()
  from experiments import inference
  from experiments.data.text.readers import decode_lines
  from experiments.evaluation.search import configured_search
  from experiments.inference import translator
  from experiments.progress import counting

  restored = inference.restore(workdir, _CHECKPOINT.value)
  search = configured_search(
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
  if _ALIGNMENTS.value:
    Path(_ALIGNMENTS.value).mkdir(parents=True, exist_ok=True)
  translate = inference.make_translator(
    restored,
    search,
    refuse_long=_LONG_LINES.value == "refuse",
    alignments=_ALIGNMENTS.value is not None,
  )
  size = 1 if sys.stdin.isatty() else _BLOCK
  source = decode_lines(sys.stdin.buffer, "standard input")
  first, unknown = 1, 0
  with counting("lines") as progress:
    while block := list(itertools.islice(source, size)):
      lines = translate(block, first=first, progress=progress)
      for number, line in enumerate(lines, start=first):
        _write(line, number)
        if line.cut:
          logging.warning("%s", line.cut)
        if line.unknown and unknown < _UNKNOWN:
          logging.warning("%s", line.unknown)
        unknown += bool(line.unknown)
        if _ALIGNMENTS.value:
          translator.save_alignments(line, number, Path(_ALIGNMENTS.value))
      first += len(block)
      sys.stdout.flush()
  if unknown > _UNKNOWN:
    logging.warning(
      "and %d more lines with characters that are not in the training text",
      unknown - _UNKNOWN,
    )


def _write(line, number: int) -> None:
  if _N_BEST.value == 1:
    print(line.texts[0])
    return
  for score, text in zip(line.scores, line.texts):
    print(number, f"{score:.4f}", text, sep="\t")


if __name__ == "__main__":
  cli.run(main)
