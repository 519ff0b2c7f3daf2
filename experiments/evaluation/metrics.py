"""How good answers are, as a whole and by length.

Fractions are from 0 to 1, BLEU and chrF from 0 to 100. Lengths count tokens
of the source without EOS.

Axes: N examples, T target.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.data.batch import PAD


class Scored(NamedTuple):
  """Answers, what they should have been, and what the model thinks of that.

  Attributes:
    lengths: [N] of the sources.
    predicted: [N, T] tokens of the answers, PAD after EOS.
    target: [N, T] tokens of the references.
    losses: [N] cross-entropy of each reference, in nats.
    tokens: [N] number of tokens of each reference, EOS included.
    answers: N answers as text.
    references: N references as text.
  """

  lengths: np.ndarray
  predicted: np.ndarray
  target: np.ndarray
  losses: np.ndarray
  tokens: np.ndarray
  answers: Sequence[str]
  references: Sequence[str]

  def chosen(self, rows: np.ndarray) -> "Scored":
    """Returns some of the examples.

    Args:
      rows: their indices.

    Returns:
      These examples alone.
    """
    arrays = [part[rows] for part in self[:5]]
    texts = [[part[i] for i in rows] for part in self[5:]]
    return Scored(*arrays, *texts)


class Judge:
  """SacreBLEU, set up.

  See "A Call for Clarity in Reporting BLEU Scores", Post, 2018
  (https://arxiv.org/abs/1804.08771), "BLEU: a Method for Automatic Evaluation
  of Machine Translation", Papineni et al., 2002, and "chrF: character n-gram
  F-score for automatic MT evaluation", Popović, 2015.

  Attributes:
    signatures: how each metric is computed, as sacreBLEU says it.

  Example:
    >>> judge = Judge("13a")
    >>> judge.signatures["bleu"]
    'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...'
    >>> judge.score(["a b c d e"], ["a b c d e"])["bleu"]
    100.0
  """

  def __init__(
    self, tokenizer: str, *, lowercase: bool = False, text: bool = True
  ):
    """Sets the metrics up.

    Args:
      tokenizer: of BLEU, as sacreBLEU names it.
      lowercase: whether BLEU ignores case.
      text: False for sequences of symbols, whose characters say nothing, and
        which may all be shorter than BLEU's n-grams.
    """
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU(
      tokenize=tokenizer,
      lowercase=lowercase,
      effective_order=not text,
      force=True,  # We know whether text is tokenised.
    )
    self._metrics = {"bleu": bleu} | ({"chrf": CHRF()} if text else {})
    for metric in self._metrics.values():
      metric.corpus_score([""], [[""]])  # Signatures count the references.
    self.signatures = {
      name: str(metric.get_signature())
      for name, metric in self._metrics.items()
    }

  def score(
    self, answers: Sequence[str], references: Sequence[str]
  ) -> dict[str, float]:
    """Scores a corpus.

    Args:
      answers: N sentences.
      references: N sentences.

    Returns:
      bleu and, of text, chrf.
    """
    scores = {}
    for name, metric in self._metrics.items():
      result = metric.corpus_score(list(answers), [list(references)])
      scores[name] = min(float(result.score), 100.0)
    return scores


def score(scored: Scored, judge: Judge) -> dict[str, float]:
  """Scores answers.

  Args:
    scored: the answers.
    judge: computes BLEU and chrF.

  Returns:
    token_accuracy (reference tokens, EOS included, that the answer has at the
    same place), sequence_accuracy (answers that are the whole reference, as
    text), bleu, chrf (of text), loss and perplexity a token.

  Example:
    >>> tokens = np.array([[5, 2]])
    >>> scored = Scored(
    ...   np.array([1]), tokens, tokens, np.array([1.5]), np.array([2]),
    ...   ["a"], ["a"],
    ... )
    >>> scores = score(scored, Judge("none", text=False))
    >>> scores["token_accuracy"], scores["loss"], scores["bleu"]
    (1.0, 0.75, 100.0)
  """
  return _accuracies(scored) | judge.score(scored.answers, scored.references)


def score_by_length(
  scored: Scored, judge: Judge | None, *, num_bins: int | None = None
) -> list[dict[str, Any]]:
  """Scores the examples of each source length, or range of lengths.

  Args:
    scored: the answers.
    judge: computes BLEU and chrF; None where they say little.
    num_bins: so many ranges of lengths at most; None for each length.

  Returns:
    One dictionary a range that occurs, shortest first: length and to_length,
    its ends, count, tokens (of references), and what `score` returns.

  Example:
    >>> tokens = np.array([[5, 2]])
    >>> scored = Scored(
    ...   np.array([1]), tokens, tokens, np.array([1.5]), np.array([2]),
    ...   ["a"], ["a"],
    ... )
    >>> rows = score_by_length(scored, None)
    >>> rows[0]["length"], rows[0]["sequence_accuracy"]
    (1, 1.0)
  """
  low, high = int(scored.lengths.min()), int(scored.lengths.max())
  width = max(1, -(-(high - low + 1) // (num_bins or high - low + 1)))
  rows = []
  for first in range(low, high + 1, width):
    inside = (scored.lengths >= first) & (scored.lengths < first + width)
    if not inside.any():
      continue
    part = scored.chosen(np.flatnonzero(inside))
    rows.append(
      {
        "length": first,
        "to_length": min(first + width - 1, high),
        "count": len(part.lengths),
        "tokens": int(part.tokens.sum()),
      }
      | (_accuracies(part) if judge is None else score(part, judge))
    )
  return rows


def _accuracies(scored: Scored) -> dict[str, float]:
  width = max(scored.predicted.shape[1], scored.target.shape[1])
  predicted, target = (
    np.pad(side, ((0, 0), (0, width - side.shape[1])), constant_values=PAD)
    for side in (scored.predicted, scored.target)
  )
  real = target != PAD
  same = [a == b for a, b in zip(scored.answers, scored.references)]
  loss = float(scored.losses.sum() / scored.tokens.sum())
  return {
    "token_accuracy": float(((predicted == target) & real).sum() / real.sum()),
    "sequence_accuracy": float(np.mean(same)),
    "loss": loss,
    "perplexity": float(np.exp(min(loss, 700.0))),
  }
