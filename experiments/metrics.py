"""How good answers are, as a whole and by length.

Fractions are from 0 to 1, BLEU from 0 to 100. Lengths count tokens of the
source without EOS.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data.batch import PAD, Batch, strip


def score(
  batch: Batch,
  predicted: np.ndarray,
  losses: np.ndarray,
  tokens: np.ndarray,
) -> dict[str, float]:
  """Scores greedy answers and reference losses.

  Args:
    batch: sources [N, S] and references [N, T].
    predicted: [N, T] decoded token ids, PAD after EOS.
    losses: [N] cross-entropy of each reference, in nats.
    tokens: [N] number of tokens of each reference, EOS included.

  Returns:
    token_accuracy (reference tokens, EOS included, that the answer has at the
    same place), sequence_accuracy (answers that are the whole reference),
    bleu (corpus BLEU over tokens), loss and perplexity a token.

  Example:
    >>> batch = Batch(np.array([[5, 2]]), np.array([[5, 2]]))
    >>> scores = score(batch, batch.target, np.array([1.5]), np.array([2]))
    >>> scores["token_accuracy"], scores["loss"]
    (1.0, 0.75)
  """
  return _accuracies(batch, predicted, losses, tokens) | {
    "bleu": bleu(
      [strip(row) for row in predicted], [strip(row) for row in batch.target]
    ),
  }


def _accuracies(batch, predicted, losses, tokens) -> dict[str, float]:
  hit, real = predicted == batch.target, batch.target != PAD
  loss = float(losses.sum() / tokens.sum())
  return {
    "token_accuracy": float((hit & real).sum() / real.sum()),
    "sequence_accuracy": float(hit.all(-1).mean()),
    "loss": loss,
    "perplexity": float(np.exp(min(loss, 700.0))),
  }


def bleu(
  predicted: Sequence[np.ndarray], references: Sequence[np.ndarray]
) -> float:
  """Corpus BLEU of token sequences, by sacreBLEU.

  See "BLEU: a Method for Automatic Evaluation of Machine Translation",
  Papineni et al., 2002, and sacreBLEU, Post, 2018
  (https://arxiv.org/abs/1804.08771).

  Args:
    predicted: one integer vector a sentence.
    references: likewise.

  Returns:
    BLEU with up to 4-grams and exponential smoothing, from 0 to 100.

  Example:
    >>> bleu([np.arange(9)], [np.arange(9)])
    100.0
  """
  import sacrebleu

  def sentences(rows):
    return [" ".join(map(str, row)) for row in rows]

  result = sacrebleu.corpus_bleu(
    sentences(predicted),
    [sentences(references)],
    tokenize="none",
    force=True,
    # Only where no answer has four tokens does this count shorter n-grams.
    use_effective_order=True,
  )
  return min(float(result.score), 100.0)


def score_by_length(
  batch: Batch,
  predicted: np.ndarray,
  losses: np.ndarray,
  tokens: np.ndarray,
) -> list[dict[str, Any]]:
  """Scores the examples of each source length by themselves.

  Args:
    batch: as for `score`.
    predicted: as for `score`.
    losses: as for `score`.
    tokens: as for `score`.

  Returns:
    One dictionary a length that occurs, shortest first: length, count,
    tokens (of references), and what `score` returns but BLEU, which says
    little of very short answers.

  Example:
    >>> batch = Batch(np.array([[5, 2]]), np.array([[5, 2]]))
    >>> rows = score_by_length(batch, batch.target, np.ones(1), np.array([2]))
    >>> rows[0]["length"], rows[0]["sequence_accuracy"]
    (1, 1.0)
  """
  lengths = (batch.source != PAD).sum(-1) - 1
  rows = []
  for length in np.unique(lengths):
    chosen = lengths == length
    part = Batch(batch.source[chosen], batch.target[chosen])
    rows.append(
      {
        "length": int(length),
        "count": int(chosen.sum()),
        "tokens": int(tokens[chosen].sum()),
      }
      | _accuracies(part, predicted[chosen], losses[chosen], tokens[chosen])
    )
  return rows
