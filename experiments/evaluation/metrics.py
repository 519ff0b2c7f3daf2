"""Metrics of predictions: fractions from 0 to 1; BLEU, chrF from 0 to 100."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.config import EvaluationConfig
from experiments.data.batch import PAD

# The names of sacreBLEU's metrics in figures and tables.
CORPUS_NAMES = {"bleu": "BLEU", "chrf": "chrF"}


class ScoredSet(NamedTuple):
  """Predictions of a set, their references, and the references' losses."""

  lengths: np.ndarray  # [N] number of tokens of each source, without EOS
  predicted_tokens: np.ndarray  # [N, T], PAD after EOS
  reference_tokens: np.ndarray  # [N, T]
  losses: np.ndarray  # [N] cross-entropy of each reference, in nats
  num_tokens: np.ndarray  # [N] number of tokens of each reference, EOS included
  predictions: Sequence[str]  # N predictions as text
  references: Sequence[str]  # N references as text

  def subset(self, indices: np.ndarray) -> "ScoredSet":
    """Returns the examples of these indices."""
    arrays = [part[indices] for part in self[:5]]
    texts = [[part[i] for i in indices] for part in self[5:]]
    return ScoredSet(*arrays, *texts)


class CorpusMetrics:
  """SacreBLEU's BLEU and, for text, chrF."""

  def __init__(self, config: EvaluationConfig, *, text: bool):
    # See Post, 2018 (https://arxiv.org/abs/1804.08771).
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU(
      tokenize=config.bleu_tokenizer,
      lowercase=config.lowercase,
      # Sequences of symbols may all be shorter than the n-grams.
      effective_order=not text,
      force=True,  # No warning about text that is already tokenized.
    )
    self._metrics = {"bleu": bleu} | ({"chrf": CHRF()} if text else {})
    for metric in self._metrics.values():
      metric.corpus_score([""], [[""]])  # Signatures count the references.
    self.signatures = {
      name: str(metric.get_signature())
      for name, metric in self._metrics.items()
    }

  def score(
    self, predictions: Sequence[str], references: Sequence[str]
  ) -> dict[str, float]:
    """Returns bleu and, for text, chrf of N sentences."""
    scores = {}
    for name, metric in self._metrics.items():
      result = metric.corpus_score(list(predictions), [list(references)])
      scores[name] = min(float(result.score), 100.0)
    return scores


def score(scored: ScoredSet, corpus: CorpusMetrics) -> dict[str, float]:
  """Returns the metrics of a set.

  The token accuracy is the share of the reference's tokens, with EOS, that are
  predicted at their place, the sequence accuracy that of equal texts.
  """
  return _accuracies(scored) | corpus.score(
    scored.predictions, scored.references
  )


def score_by_length(
  scored: ScoredSet,
  corpus: CorpusMetrics | None,  # None: without BLEU and chrF
  *,
  num_bins: int | None = None,
) -> list[dict[str, Any]]:
  """Returns the metrics of each source length, or of `num_bins` ranges."""
  lengths, rows = scored.lengths, []
  for first, last in length_ranges(lengths.min(), lengths.max(), num_bins):
    inside = np.flatnonzero((lengths >= first) & (lengths <= last))
    if not inside.size:
      continue
    part = scored.subset(inside)
    rows.append(
      {
        "length": first,
        "to_length": last,
        "count": len(inside),
        "tokens": int(part.num_tokens.sum()),
      }
      | (_accuracies(part) if corpus is None else score(part, corpus))
    )
  return rows


def length_ranges(
  low: int, high: int, num_bins: int | None
) -> list[tuple[int, int]]:
  """Divides lengths into at most `num_bins` ranges; None: one a length."""
  low, high = int(low), int(high)
  width = -(-(high - low + 1) // (num_bins or high - low + 1))
  return [
    (first, min(first + width - 1, high))
    for first in range(low, high + 1, width)
  ]


def _accuracies(scored: ScoredSet) -> dict[str, float]:
  sides = (scored.predicted_tokens, scored.reference_tokens)
  width = max(side.shape[1] for side in sides)
  predicted, reference = (
    np.pad(side, ((0, 0), (0, width - side.shape[1])), constant_values=PAD)
    for side in sides
  )
  real = reference != PAD
  hits = (predicted == reference) & real
  same = [a == b for a, b in zip(scored.predictions, scored.references)]
  loss = float(scored.losses.sum() / scored.num_tokens.sum())
  return {
    "token_accuracy": float(hits.sum() / real.sum()),
    "sequence_accuracy": float(np.mean(same)),
    "loss": loss,
    "perplexity": float(np.exp(min(loss, 700.0))),
  }
