"""Figures of attention weights: which examples, and which words."""

import numpy as np
import pytest

from experiments.data.batch import EOS, PAD, Batch
from experiments.data.dataset import EvaluationSet
from experiments.errors import UserError
from experiments.visualization import alignments


def sources(*lengths):
  array = np.full((len(lengths), max(lengths)), PAD)
  for row, length in zip(array, lengths):
    row[:length] = [*range(5, 4 + length), EOS]
  return array


@pytest.mark.parametrize(
  ("lengths", "expected"),
  [
    ((3,), {3}),
    ((3, 9), {3, 9}),
    ((40, 5, 30, 9, 7), {9, 7, 5}),
    ((40, 30), {40, 30}),
    (tuple(range(2, 40)), {16, 15, 14, 13, 12, 11, 10, 9}),
  ],
)
def test_drawn_examples_have_different_legible_lengths(lengths, expected):
  chosen = alignments._legible(sources(*lengths))
  found = (chosen != PAD).sum(1).tolist()
  assert len(set(found)) == len(found) == min(4, len(expected))
  assert set(found) <= expected
  assert chosen.shape[1] == max(found)


def test_blank_sources_are_no_examples():
  class Data:
    source_words = staticmethod(lambda tokens: list(map(str, tokens)))

    def __init__(self, *lengths):
      batch = Batch(sources(*lengths), sources(*lengths))
      self.evaluation_set = lambda _: EvaluationSet(batch, None, 0)

  assert alignments.example_lines(Data(1, 3, 1), "test", 8) == ["5 6"]
  with pytest.raises(UserError, match="sources of the set 'test' are blank"):
    alignments.example_lines(Data(1, 1), "test", 8)


def test_a_panel_has_a_word_for_each_row_and_column():
  class Data:
    source_words = target_words = staticmethod(lambda x: list(map(str, x)))

  source = np.array([7, EOS, PAD])
  for target in ([8, EOS, PAD, PAD], [8, 9, PAD, PAD], [8, 9, 8, 9]):
    target = np.array(target)
    weights = np.ones((1, 1, (target != PAD).sum(), 2))
    words = alignments._words(Data, source, target)
    (panel,) = alignments.make_panels(*words, weights)
    assert panel.target == [str(token) for token in target if token != PAD]
    assert panel.weights.shape == (len(panel.target), len(panel.source))
