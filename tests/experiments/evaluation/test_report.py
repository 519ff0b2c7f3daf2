"""Which examples are drawn, and what of them."""

import numpy as np
import pytest

from experiments.data.batch import EOS, PAD
from experiments.evaluation import alignment_error, report


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
def test_examples_differ_and_can_be_read_if_any_can(lengths, expected):
  chosen = report._readable(sources(*lengths))
  found = (chosen != PAD).sum(1).tolist()
  assert len(set(found)) == len(found) == min(4, len(expected))
  assert set(found) <= expected
  assert chosen.shape[1] == max(found)


def test_a_panel_ends_where_the_answer_does():
  class Run:
    class data:
      source_words = target_words = staticmethod(lambda x: list(map(str, x)))

  source, weights = np.array([7, EOS, PAD]), np.ones((1, 4, 3))
  for answer, words in (
    ([8, EOS, PAD, PAD], ["8", str(EOS)]),
    ([8, 9, PAD, PAD], ["8", "9"]),
    ([8, 9, 8, 9], ["8", "9", "8", "9"]),
  ):
    (panel,) = alignment_error._panels(Run, source, np.array(answer), weights)
    assert panel.target == words
    assert panel.weights.shape == (len(words), 2)
