"""Evaluating a model on a set: greedy answers, scored as a whole and by length.

Axes: N examples, B of them at a time, S source, T target.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from experiments import decode, metrics, sharding, steps
from experiments.data.batch import PAD, Array, Batch

BATCH_SIZE = 256


class Evaluation(NamedTuple):
  """What came of an evaluation.

  Attributes:
    metrics: name to value, see `metrics.score`, and sentences_per_second.
    by_length: a dictionary a source length, see `metrics.score_by_length`.
    predicted: [N, T] decoded tokens.
  """

  metrics: dict[str, float]
  by_length: list[dict[str, Any]]
  predicted: np.ndarray


def make_evaluator(
  model: nn.Module, mesh: Mesh
) -> Callable[[Any, Batch], Evaluation]:
  """Makes a function that evaluates parameters on a set.

  It compiles once for each width of a set.

  Args:
    model: the model.
    mesh: the devices.

  Returns:
    (params, set) -> evaluation.

  Example:
    >>> from experiments.data.tasks import Task
    >>> from experiments.models.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6, attention="none")
    >>> task = Task("copy", symbols=6, min_length=1, max_length=2)
    >>> examples = task.evaluation_set(seed=0, size=4)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), *examples)
    >>> params = jax.tree.map(
    ...   lambda leaf: np.zeros(leaf.shape, leaf.dtype), variables["params"]
    ... )
    >>> evaluate = make_evaluator(model, sharding.make_mesh(1))
    >>> evaluate(params, examples).predicted.shape
    (4, 3)
  """
  devices = mesh.shape[sharding.BATCH_AXIS]
  size = -(-BATCH_SIZE // devices) * devices
  whole, split = sharding.replicated(mesh), sharding.batched(mesh)
  loss_step = jax.jit(steps.make_loss_step(model), out_shardings=whole)

  def answer(params, source, max_length):
    return decode.greedy(model, params, source, max_length=max_length)

  answer = jax.jit(answer, static_argnums=2, out_shardings=whole)

  compiled = set()

  def run(params: Any, examples: Batch, start: int):
    batch = Batch(*(_rows(part, start, size) for part in examples))
    batch = sharding.place(batch, split)
    predicted = answer(params, batch.source, batch.target.shape[1])
    return jax.block_until_ready((predicted, *loss_step(params, batch)))

  def evaluate(params: Any, examples: Batch) -> Evaluation:
    widths = (examples.source.shape[1], examples.target.shape[1])
    if widths not in compiled:
      run(params, examples, 0)  # compiles, which is not to be timed
      compiled.add(widths)
    begin = time.perf_counter()
    parts = [
      run(params, examples, start)
      for start in range(0, len(examples.source), size)
    ]
    columns = [np.concatenate(column) for column in zip(*parts)]
    results = [column[: len(examples.source)] for column in columns]
    seconds = time.perf_counter() - begin
    scores = metrics.score(examples, *results)
    scores["sentences_per_second"] = len(examples.source) / seconds
    return Evaluation(
      scores, metrics.score_by_length(examples, *results), results[0]
    )

  return evaluate


def _rows(array: Array, start: int, size: int) -> np.ndarray:
  """Takes `size` rows from `start`, filled up with rows of PAD."""
  rows = np.asarray(array)[start : start + size]
  return np.pad(rows, ((0, size - len(rows)), (0, 0)), constant_values=PAD)


def table(rows: list[dict[str, Any]], *, num_bins: int = 10) -> str:
  """Lays accuracy by length out as a table of text.

  Args:
    rows: `Evaluation.by_length`.
    num_bins: lengths are pooled into about so many ranges.

  Returns:
    A heading and a line a range of lengths.

  Example:
    >>> print(table([{"length": 3, "count": 2, "tokens": 8,
    ...               "token_accuracy": 1.0, "sequence_accuracy": 0.5}]))
    length    examples  token accuracy  sequence accuracy
    3                2         100.00%             50.00%
  """
  lines = ["length    examples  token accuracy  sequence accuracy"]
  low, high = rows[0]["length"], rows[-1]["length"]
  width = max(1, -(-(high - low + 1) // num_bins))
  for first in range(low, high + 1, width):
    chosen = [r for r in rows if first <= r["length"] < first + width]
    if not chosen:
      continue
    count = sum(row["count"] for row in chosen)
    token = np.average(
      [r["token_accuracy"] for r in chosen],
      weights=[r["tokens"] for r in chosen],
    )
    whole = np.average(
      [r["sequence_accuracy"] for r in chosen],
      weights=[r["count"] for r in chosen],
    )
    last = min(first + width - 1, high)
    name = str(first) if first == last else f"{first}-{last}"
    lines.append(f"{name:<8}{count:>10}{token:>16.2%}{whole:>19.2%}")
  return "\n".join(lines)
