"""What an evaluation leaves in a run's directory, and on the screen."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import decoding
from experiments.data.batch import PAD
from experiments.data.dataset import EvaluationSet
from experiments.evaluation.alignment_error import make_looker
from experiments.evaluation.evaluator import Evaluation, table
from experiments.experiment import Run
from experiments.run_directory import write_json
from experiments.visualization import plots

_NUM_EXAMPLES = 4
# A picture of longer sequences cannot be read.
_READABLE = 16


def write_evaluation(
  workdir: Path, split: str, used: str, evaluation: Evaluation
) -> None:
  """Writes eval/SPLIT.json, and the answers as eval/SPLIT.txt.

  Args:
    workdir: the run's directory.
    split: name of the evaluation set.
    used: the checkpoint evaluated, for a reader.
    evaluation: what came of it.

  Example:
    >>> import tempfile
    >>> metrics = {
    ...   "token_accuracy": 0.9, "sequence_accuracy": 0.5, "bleu": 80.0,
    ...   "loss": 0.1, "sentences_per_second": 2000.0,
    ... }
    >>> row = {"length": 3, "to_length": 3, "count": 2, "tokens": 8,
    ...        "token_accuracy": 0.9, "sequence_accuracy": 0.5}
    >>> answers = ["1 2 3", "4 5 6"]
    >>> evaluation = Evaluation(metrics, [row], {}, answers, {}, 0, 9, {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   write_evaluation(Path(folder), "test", "step 10", evaluation)
    ...   sorted(path.name for path in Path(folder).glob("eval/*"))
    ['test.json', 'test.txt']
  """
  write_json(
    workdir / "eval" / f"{split}.json",
    {
      "split": split,
      "checkpoint": used,
      "parameters": evaluation.num_parameters,
      "search": evaluation.search,
      "metrics": evaluation.metrics,
      "signatures": evaluation.signatures,
      "by_length": evaluation.by_length,
      "alignment_error_rates": evaluation.alignment,
    },
  )
  answers = "".join(f"{line}\n" for line in evaluation.answers)
  (workdir / "eval" / f"{split}.txt").write_text(answers, encoding="utf-8")


def described(split: str, evaluation: Evaluation) -> str:
  """Tells a reader what came of an evaluation.

  Args:
    split: name of the evaluation set.
    evaluation: what came of it.

  Returns:
    A line of metrics, and a table by length.

  Example:
    >>> print(described("test", evaluation))  # doctest: +SKIP
    test: token accuracy 90.00%, sequence accuracy 50.00%, BLEU 80.00, ...
  """
  lines = [f"{split}: {summary(evaluation)}", table(evaluation.by_length)]
  if evaluation.num_truncated:
    lines.append(
      f"{evaluation.num_truncated:,} of {len(evaluation.answers):,} pairs are"
      " longer than the model reads, and were cut"
    )
  if "chrf" in evaluation.signatures:
    lines += [f"{name}: {x}" for name, x in evaluation.signatures.items()]
  return "\n".join(lines)


def summary(evaluation: Evaluation) -> str:
  """Returns the metrics of an evaluation in a line.

  Args:
    evaluation: what came of it.

  Returns:
    A line for a reader.

  Example:
    >>> metrics = {
    ...   "token_accuracy": 0.9, "sequence_accuracy": 0.5, "bleu": 80.0,
    ...   "loss": 0.1, "sentences_per_second": 2000.0,
    ... }
    >>> summary(Evaluation(metrics, [], {}, [], {}, 0, 9, {}))
    'token accuracy 90.00%, sequence accuracy 50.00%, BLEU 80.00, loss ...'
  """
  scores = evaluation.metrics
  return (
    f"token accuracy {scores['token_accuracy']:.2%}, sequence accuracy"
    f" {scores['sequence_accuracy']:.2%}, BLEU {scores['bleu']:.2f},"
    + (f" chrF {scores['chrf']:.2f}," if "chrf" in scores else "")
    + (
      f" alignment error {scores['alignment_error_rate']:.2%},"
      if "alignment_error_rate" in scores
      else ""
    )
    + f" loss {scores['loss']:.4f}"
    f" ({scores['sentences_per_second']:,.0f} sentences/s)"
  )


def draw_alignments(
  workdir: Path, split: str, run: Run, params: Any, examples: EvaluationSet
) -> Path:
  """Draws where the model looks while it answers.

  Args:
    workdir: the run's directory.
    split: name of the evaluation set.
    run: its parts.
    params: the parameters to answer with.
    examples: a set; four of its examples are drawn, or all heads over one.

  Returns:
    The picture, figures/alignments_SPLIT.png; the weights themselves stand
    beside it, as .npz.

  Example:
    >>> examples = run.data.evaluation_set("test")  # doctest: +SKIP
    >>> draw_alignments(
    ...   workdir, "test", run, params, examples
    ... )  # doctest: +SKIP
    PosixPath('runs/reverse/figures/alignments_test.png')
  """
  source = _readable(np.asarray(examples.batch.source))
  length = run.data.max_prediction_length(source.shape[1])
  answer = functools.partial(decoding.greedy, run.model, max_length=length)
  answers = np.asarray(jax.jit(answer)(params, source))
  looked = make_looker(run)(params, source, answers)
  panels = looked[0] if len(looked[0]) > 1 else [look[0] for look in looked]
  path = workdir / "figures" / f"alignments_{split}.png"
  if jax.process_index() == 0:
    plots.save_attention_figure(panels, path)
    plots.save_attention_weights(panels, path.with_suffix(".npz"))
  return path


def _readable(source: np.ndarray) -> np.ndarray:
  """Chooses sources of spread lengths, the longest that can be read first."""
  lengths = (source != PAD).sum(-1)
  order = np.argsort(-lengths, kind="stable")
  readable = order[lengths[order] <= _READABLE]
  if not len(readable):
    readable = order[::-1]
  longer_half = readable[: max(len(readable) // 2, _NUM_EXAMPLES)]
  spread = np.arange(_NUM_EXAMPLES) * len(longer_half) // _NUM_EXAMPLES
  chosen = longer_half[np.unique(spread)]
  return source[chosen, : lengths[chosen].max()]
