"""Metrics: counted by hand, and as sacreBLEU's command computes them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.config import EvaluationConfig
from experiments.data.batch import PAD
from experiments.evaluation import metrics

SYMBOLS = metrics.CorpusMetrics(EvaluationConfig(), text=False)


def text_metrics(tokenizer, **options):
  config = EvaluationConfig(bleu_tokenizer=tokenizer, **options)
  return metrics.CorpusMetrics(config, text=True)


def scored(**changes):
  """Two examples of a task: three symbols and one, an error in the first."""
  example = metrics.ScoredSet(
    lengths=np.array([3, 1]),
    predicted_tokens=np.array([[3, 4, 6, 2], [6, 2, 0, 0]]),
    reference_tokens=np.array([[3, 4, 5, 2], [6, 2, 0, 0]]),
    losses=np.array([4.0, 2.0]),
    num_tokens=np.array([4, 2]),
    predictions=["0 1 3", "3"],
    references=["0 1 2", "3"],
  )
  return example._replace(**changes)


def test_scores_count_tokens_and_whole_sequences():
  scores = metrics.score(scored(), SYMBOLS)
  assert scores["token_accuracy"] == pytest.approx(5 / 6)
  assert scores["sequence_accuracy"] == pytest.approx(1 / 2)
  assert scores["loss"] == pytest.approx(1.0)
  assert scores["perplexity"] == pytest.approx(np.e)


def test_scores_by_length_add_up():
  rows = metrics.score_by_length(scored(), None)
  assert [(row["length"], row["count"], row["tokens"]) for row in rows] == [
    (1, 1, 2),
    (3, 1, 4),
  ]
  assert [row["sequence_accuracy"] for row in rows] == [1.0, 0.0]


def test_a_prediction_without_eos_is_wrong():
  scores = metrics.score(
    metrics.ScoredSet(
      lengths=np.array([2]),
      predicted_tokens=np.array([[3, 4, 4]]),
      reference_tokens=np.array([[3, 4, 2]]),
      losses=np.ones(1),
      num_tokens=np.ones(1),
      predictions=["0 1 1"],
      references=["0 1"],
    ),
    SYMBOLS,
  )
  assert scores["sequence_accuracy"] == 0.0
  assert scores["token_accuracy"] == pytest.approx(2 / 3)


def test_predictions_and_references_may_differ_in_width():
  for side in ("predicted_tokens", "reference_tokens"):
    wider = np.pad(getattr(scored(), side), ((0, 0), (0, 5)))
    scores = metrics.score(scored(**{side: wider}), SYMBOLS)
    assert scores == metrics.score(scored(), SYMBOLS)
  short = scored(predicted_tokens=scored().predicted_tokens[:, :2])
  assert metrics.score(short, SYMBOLS)["token_accuracy"] == pytest.approx(4 / 6)


def test_bleu_of_predictions_of_one_token_counts_unigrams():
  assert SYMBOLS.score(["5", "6"], ["5", "6"])["bleu"] == pytest.approx(100)
  assert SYMBOLS.score(["5", "6"], ["5", "5"])["bleu"] == pytest.approx(50)


WORDS = ["The", "the", "dog,", "Dog's", "red-brown", "house.", "is!", "It's"]
WORDS += ["1,000", "(big)", "élan", "a"]


def sentences(count):
  """Random references, and predictions of which most words are right."""
  rng = np.random.default_rng(0)
  references = [
    " ".join(rng.choice(WORDS, rng.integers(4, 20))) for _ in range(count)
  ]
  predictions = [
    " ".join(
      word if rng.random() < 0.8 else str(rng.choice(WORDS))
      for word in line.split()[: rng.integers(3, 25)]
    )
    for line in references
  ]
  # Also one that says nothing, and one in other letters.
  return [*predictions[:-2], "", predictions[-1].upper()], references


@pytest.mark.parametrize(
  ("tokenizer", "lowercase"),
  [("13a", False), ("none", False), ("13a", True), ("intl", True)],
)
def test_scores_equal_those_of_the_sacrebleu_command(
  tokenizer, lowercase, tmp_path
):
  predictions, references = sentences(60)
  for name, lines in (("predictions", predictions), ("references", references)):
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / name).write_text(text, encoding="utf-8")
  command = [sys.executable, "-m", "sacrebleu", "references"]
  command += ["-i", "predictions", "-m", "bleu", "chrf", "-w", "9", "--force"]
  command += ["--tokenize", tokenizer, *["-lc"] * lowercase]
  done = subprocess.run(
    command, cwd=tmp_path, capture_output=True, text=True, check=True
  )
  corpus = text_metrics(tokenizer, lowercase=lowercase)
  scores = corpus.score(predictions, references)
  assert scores.keys() == {"bleu", "chrf"}
  for name, expected in zip(("bleu", "chrf"), json.loads(done.stdout)):
    assert expected["name"].lower().startswith(name)
    assert 30 < expected["score"] < 95
    assert scores[name] == pytest.approx(expected["score"], abs=1e-8)
    assert corpus.signatures[name] == expected["signature"]


def translated(count=100):
  """As an evaluation of text scores it, but for tokens drawn at random."""
  predictions, references = sentences(count)
  rng = np.random.default_rng(1)
  tokens = np.array([len(line.split()) + 1 for line in references])
  place = np.arange(tokens.max())
  target = np.where(place < tokens[:, None], 3 + place % 5, PAD)
  predicted = np.where(rng.random(target.shape) < 0.2, 9, target)
  lengths = rng.integers(2, 33, count)
  losses = rng.random(count)
  return metrics.ScoredSet(
    lengths, predicted, target, losses, tokens, predictions, references
  )


@pytest.mark.parametrize("num_bins", [1, 4, 10, 100, None])
def test_every_example_is_in_one_range_of_lengths(num_bins):
  examples, corpus = translated(), text_metrics("13a")
  whole = metrics.score(examples, corpus)
  rows = metrics.score_by_length(examples, corpus, num_bins=num_bins)
  assert len(rows) <= (num_bins or 31)
  assert num_bins != 1 or len(rows) == 1
  ends = [(row["length"], row["to_length"]) for row in rows]
  assert ends == sorted(ends)
  assert ends[0][0] == examples.lengths.min()
  assert ends[-1][1] == examples.lengths.max()
  assert sum(row["count"] for row in rows) == len(examples.lengths)
  assert sum(row["tokens"] for row in rows) == examples.num_tokens.sum()
  for name, unit in (
    ("token_accuracy", "tokens"),
    ("loss", "tokens"),
    ("sequence_accuracy", "count"),
  ):
    weights = [row[unit] for row in rows]
    mean = np.average([row[name] for row in rows], weights=weights)
    assert mean == pytest.approx(whole[name])


def test_each_range_is_scored_separately():
  examples, corpus = translated(), text_metrics("13a")
  for row in metrics.score_by_length(examples, corpus, num_bins=3):
    inside = np.flatnonzero(
      (examples.lengths >= row["length"])
      & (examples.lengths <= row["to_length"])
    )
    expected = corpus.score(
      [examples.predictions[i] for i in inside],
      [examples.references[i] for i in inside],
    )
    assert row["count"] == len(inside) > 5
    assert {name: row[name] for name in expected} == expected
