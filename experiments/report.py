"""What an evaluation leaves in a run's directory, and on the screen."""

from pathlib import Path

import jax
import numpy as np

from experiments import decode, plots
from experiments.data.batch import EOS, PAD, Batch
from experiments.evaluation import Evaluation, table
from experiments.runs import Run
from experiments.steps import TrainState
from experiments.workdir import write_json

_NUM_EXAMPLES = 4
# A picture of longer sequences cannot be read.
_READABLE = 16


def write_evaluation(
  workdir: Path, split: str, step: int, evaluation: Evaluation
) -> str:
  """Writes eval/SPLIT.json.

  Args:
    workdir: the run's directory.
    split: name of the evaluation set.
    step: of the checkpoint evaluated.
    evaluation: what came of it.

  Returns:
    The same for a reader: a line of metrics, and a table by length.

  Example:
    >>> import tempfile
    >>> metrics = {
    ...   "token_accuracy": 0.9, "sequence_accuracy": 0.5, "bleu": 80.0,
    ...   "loss": 0.1, "sentences_per_second": 2000.0,
    ... }
    >>> row = {"length": 3, "count": 2, "tokens": 8,
    ...        "token_accuracy": 0.9, "sequence_accuracy": 0.5}
    >>> evaluation = Evaluation(metrics, [row], np.zeros((2, 4), np.int32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   text = write_evaluation(Path(folder), "test", 10, evaluation)
    >>> text.startswith("test: token accuracy 90.00%")
    True
  """
  write_json(
    workdir / "eval" / f"{split}.json",
    {
      "split": split,
      "step": step,
      "metrics": evaluation.metrics,
      "by_length": evaluation.by_length,
    },
  )
  return f"{split}: {summary(evaluation)}\n{table(evaluation.by_length)}"


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
    >>> summary(Evaluation(metrics, [], np.zeros((2, 4), np.int32)))
    'token accuracy 90.00%, sequence accuracy 50.00%, BLEU 80.00, loss ...'
  """
  scores = evaluation.metrics
  return (
    f"token accuracy {scores['token_accuracy']:.2%}, sequence accuracy"
    f" {scores['sequence_accuracy']:.2%}, BLEU {scores['bleu']:.2f}, loss"
    f" {scores['loss']:.4f} ({scores['sentences_per_second']:,.0f}"
    " sentences/s)"
  )


def draw_alignments(
  workdir: Path, run: Run, state: TrainState, examples: Batch
) -> Path:
  """Draws where the model looks while it answers: figures/alignments.png.

  Args:
    workdir: the run's directory.
    run: its parts.
    state: its parameters.
    examples: a set; four of its examples are drawn, or all heads over one.

  Returns:
    The picture's path.

  Example:
    >>> examples = runs.evaluation_set(run, "test")  # doctest: +SKIP
    >>> draw_alignments(workdir, run, state, examples)  # doctest: +SKIP
    PosixPath('runs/reverse/figures/alignments.png')
  """
  batch = _readable(examples)

  def look(params, source):
    max_length = batch.target.shape[1]
    answer = decode.greedy(run.model, params, source, max_length=max_length)
    return answer, decode.alignments(run.model, params, source, answer)

  answers, weights = jax.device_get(jax.jit(look)(state.params, batch.source))
  panels = []
  for source, answer, heads in zip(batch.source, answers, weights):
    source = source[source != PAD]
    answer = answer[: np.argmax(np.append(answer, EOS) == EOS) + 1]
    for index, head in enumerate(heads):
      panels.append(
        plots.Alignment(
          head[: len(answer), : len(source)],
          run.task.words(source),
          run.task.words(answer),
          _title(run, index) if len(heads) > 1 else "",
        )
      )
    if len(heads) > 1:
      break
  path = workdir / "figures" / "alignments.png"
  if jax.process_index() == 0:
    plots.save_alignments(panels, path)
  return path


def _title(run: Run, index: int) -> str:
  layer, head = divmod(index, run.model.num_heads)
  return f"layer {layer + 1}, head {head + 1}"


def _readable(examples: Batch) -> Batch:
  """Chooses examples of spread lengths, the longest first."""
  lengths = (examples.source != PAD).sum(-1)
  order = np.argsort(-np.where(lengths <= _READABLE, lengths, 0), kind="stable")
  usable = max(int((lengths <= _READABLE).sum()), 1)
  chosen = order[np.arange(_NUM_EXAMPLES) * usable // (2 * _NUM_EXAMPLES)]
  return Batch(examples.source[chosen], examples.target[chosen])
