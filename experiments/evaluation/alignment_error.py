"""Where a model looks while it answers, and how often that is wrong.

Axes: N examples, P panels (heads) of attention weights, S source, T target.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from experiments import decoding
from experiments.data.batch import PAD
from experiments.data.dataset import EvaluationSet
from experiments.data.gold_alignments import GoldAlignments
from experiments.decoding.batching import filled
from experiments.experiment import Run
from experiments.visualization import plots

# Enough for a rate to one percent; each takes a step a token.
_NUM_ALIGNED = 256
_ALONE = "attention"  # the title of a panel that is the only one


def make_looker(run: Run) -> Callable[..., list[list[plots.AttentionPanel]]]:
  """Makes a function that tells where a model looks while it answers.

  It compiles once for each of few widths.

  Args:
    run: the parts of a run.

  Returns:
    (params, sources [N, S], answers [N, T]) -> panels for each source, one a
    head of the Transformer's layers.

  Example:
    >>> look = make_looker(run)  # doctest: +SKIP
    >>> look(params, source, answers)[0][0].weights.shape  # doctest: +SKIP
    (9, 8)
  """
  look = jax.jit(functools.partial(decoding.alignments, run.model))

  def looks(params, source, answers):
    source, answers = (filled(x, len(x)) for x in (source, answers))
    weights = np.asarray(look(params, source, answers))
    return [_panels(run, *example) for example in zip(source, answers, weights)]

  return looks


def make_aligner(run: Run) -> Callable[..., dict[str, float]]:
  """Makes a function that compares where a model looks with where it should.

  Each token of a reference is aligned to the source token with the largest
  weight, as the model follows the references of up to 256 examples.

  Args:
    run: the parts of a run.

  Returns:
    (params, set) -> the alignment error rate of each panel, by its title; over
    the examples whose true alignment is known. Nothing if that is none, or if
    the model looks nowhere.

  Example:
    >>> make_aligner(run)(params, examples)  # doctest: +SKIP
    {'layer 1, head 1': 0.86, 'layer 1, head 2': 0.12}
  """
  look = make_looker(run)

  def align(params: Any, examples: EvaluationSet) -> dict[str, float]:
    source, target = (np.asarray(x)[:_NUM_ALIGNED] for x in examples.batch)
    links = [
      run.data.gold_alignments(*(x[x != PAD] for x in pair))
      for pair in zip(source, target)
    ]
    known = [i for i, each in enumerate(links) if each is not None]
    if not known:
      return {}
    pairs: dict[str, list[tuple[np.ndarray, Any]]] = {}
    for i, panels in zip(known, look(params, source[known], target[known])):
      for panel in panels:
        if not panel.weights.any():
          continue
        pairs.setdefault(panel.title or _ALONE, []).append(
          (panel.weights, links[i])
        )
    return {title: alignment_error_rate(each) for title, each in pairs.items()}

  return align


def alignment_error_rate(
  pairs: Iterable[tuple[np.ndarray, GoldAlignments]],
) -> float:
  """Returns the share of alignments that are wrong.

  `1 - (|A and S| + |A and P|) / (|A| + |S|)` of alignments A, sure links S and
  possible ones P. See "A Systematic Comparison of Various Statistical Alignment
  Models", Och and Ney, 2003, section 5 (https://aclanthology.org/J03-1002/).

  Args:
    pairs: weights [T, S] and `GoldAlignments` of each example. A target token
      is aligned where it has the largest weight, unless it has no link.

  Returns:
    From 0, all right, to 1.

  Example:
    >>> links = GoldAlignments(*[np.eye(2, dtype=bool)] * 2)
    >>> weights = np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> alignment_error_rate([(weights, links)])
    0.5
  """
  aligned = sure = right = 0
  for weights, links in pairs:
    linked = links.possible.any(1)
    chosen = weights.argmax(1)[linked]
    place = np.flatnonzero(linked)
    aligned += len(chosen)
    sure += int(links.sure.sum())
    right += int(links.sure[place, chosen].sum())
    right += int(links.possible[place, chosen].sum())
  return 1 - right / max(aligned + sure, 1)


def _panels(run: Run, source, answer, heads) -> list[plots.AttentionPanel]:
  source, answer = source[source != PAD], answer[answer != PAD]
  return [
    plots.AttentionPanel(
      head[: len(answer), : len(source)],
      run.data.source_words(source),
      run.data.target_words(answer),
      _title(run, index) if len(heads) > 1 else "",
    )
    for index, head in enumerate(heads)
  ]


def _title(run: Run, index: int) -> str:
  layer, head = divmod(index, run.model.num_heads)
  return f"layer {layer + 1}, head {head + 1}"
