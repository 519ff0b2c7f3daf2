"""Gold alignments, and the alignment error rate against them."""

import numpy as np
import pytest

from configs import base
from experiments.config import DigitRange, parse
from experiments.data import gold_alignments
from experiments.data.batch import EOS, PAD
from experiments.data.gold_alignments import GoldAlignments
from experiments.data.text import readers
from experiments.data.text.numbers import draw, spelled
from experiments.evaluation import alignment_error
from experiments.evaluation.alignment_error import alignment_error_rates
from experiments.experiment import make_experiment


def words(text):
  """The labels of a word tokenizer."""
  return [f"_{word}" for word in text.split()]


def letters(text):
  return list(f"_{text}".replace(" ", "_"))


def aligned(number, kind="sure"):
  """Returns pairs of Korean letters and English words."""
  (english,), (korean,) = (spelled([number], name) for name in ("en", "ko"))
  source, target = words(english), letters(korean)
  aligned = getattr(gold_alignments.number_alignments(source, target), kind)
  return {
    (target[t], source[s].strip("_,")) for t, s in zip(*np.nonzero(aligned))
  }


def test_words_of_the_same_digit_are_surely_aligned():
  assert aligned(12345) == {
    ("만", "twelve"),  # a one, not written
    ("이", "twelve"),
    ("삼", "three"),
    ("사", "forty-five"),
    ("오", "forty-five"),
  }
  assert aligned(4110) == {("사", "four"), ("백", "one"), ("십", "ten")}
  assert aligned(70_000) == {("칠", "seventy")}


def test_words_of_places_are_possibly_aligned():
  possible = aligned(3200, "possible")
  assert {("천", "three"), ("천", "thousand"), ("백", "hundred")} <= possible
  assert ("백", "three") not in possible
  assert ("이", "thousand") not in possible
  # A myriad spans two of the English groups of digits.
  possible = aligned(45_678_000, "possible")
  assert {("만", "million"), ("만", "thousand")} <= possible


def test_every_nonzero_digit_has_one_word_on_each_side():
  wanted = DigitRange(min_digits=1, max_digits=16, num_examples=400)
  for number in draw("train", wanted, seed=0):
    (english,), (korean,) = (spelled([number], name) for name in ("en", "ko"))
    gold = gold_alignments.number_alignments(words(english), letters(korean))
    digits = sum(digit != "0" for digit in str(number))
    assert gold.sure.any(1).sum() == digits
    assert (gold.sure.sum(1) <= 1).all()
    assert (gold.possible >= gold.sure).all()
    # Only spaces and "and" are aligned with nothing.
    unaligned = {
      letters(korean)[i] for i in np.nonzero(~gold.possible.any(1))[0]
    }
    assert unaligned <= {"_"}
    unaligned = {
      words(english)[i] for i in np.nonzero(~gold.possible.any(0))[0]
    }
    assert unaligned <= {"_and"}


def test_subwords_inherit_the_alignment_of_their_letters():
  whole = gold_alignments.number_alignments(["_twelve"], ["_십이"])
  cut = gold_alignments.number_alignments(["_twe", "lve"], ["_", "십", "이"])
  assert whole.sure.all()
  np.testing.assert_array_equal(cut.sure, [[0, 0], [1, 1], [1, 1]])


@pytest.mark.parametrize(
  ("source", "target", "message"),
  [("_dozen", "_십이", "'dozen'"), ("_twelve", "_십a", "'a'")],
)
def test_words_outside_numbers_are_refused(source, target, message):
  with pytest.raises(ValueError, match=message):
    gold_alignments.number_alignments([source], [target])


def test_rate_matches_och_and_ney():
  sure = np.array([[1, 0, 0], [0, 0, 0], [0, 0, 1]], bool)
  possible = sure | np.array([[0, 1, 0], [0, 1, 0], [0, 0, 0]], bool)
  weights = np.array([[0.1, 0.9, 0], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
  # A = {01, 11, 22}, of which {22} are sure and all possible; |S| = 2.
  rate = alignment_error.alignment_error_rate(
    [(weights, GoldAlignments(sure, possible))]
  )
  assert rate == pytest.approx(1 - (1 + 3) / (3 + 2))


def test_tokens_without_a_positive_weight_are_not_aligned():
  gold = GoldAlignments(*[np.eye(3, dtype=bool)] * 2)
  weights = np.array([[0.9, 0.8, -0.9], [0.0, 0.0, 0.0], [-0.1, -0.2, -0.3]])
  # A = {00}, which is sure; |S| = 3.
  rate = alignment_error.alignment_error_rate([(weights, gold)])
  assert rate == pytest.approx(1 - (1 + 1) / (1 + 3))


@pytest.mark.parametrize("name", ["copy", "reverse"])
def test_correct_attention_has_no_error(name, monkeypatch):
  experiment, examples = made(name)

  def weights(model, params, source, target):
    del model, params
    return [
      experiment.data.gold_alignments(*pair).sure[None, None]
      for pair in zip(*(map(stripped, x) for x in (source, target)))
    ]

  monkeypatch.setattr(alignment_error, "unpadded_weights", weights)
  assert alignment_error_rates(experiment, None, examples) == {"attention": 0.0}
  sources, targets = examples.batch
  for source, target in zip(sources, targets):
    gold = experiment.data.gold_alignments(
      stripped(source), stripped(target)
    ).sure
    t, s = np.nonzero(gold)
    np.testing.assert_array_equal(target[t], source[s])
    assert len(t) == (source > EOS).sum()


def stripped(row):
  return row[row != PAD]


def made(name, arg="dot", folder=None):
  config = base.get_config(arg)
  config.data.update(name=name, symbols=8, max_length=4)
  config.data.splits = {"validation": base.split(1, 4, 4)}
  experiment = make_experiment(parse(shrunk(config).to_dict()), folder)
  return experiment, experiment.data.evaluation_set("validation")


def shrunk(config):
  """Makes the model small, so that it compiles fast."""
  if "hidden_size" in config.model:
    config.model.update(hidden_size=8, embedding_size=8)
  return config


@pytest.mark.exhaustive
def test_every_head_has_its_own_rate():
  experiment, examples = made("reverse", "transformer")
  params = experiment.initial_state().params
  rates = alignment_error_rates(experiment, params, examples)
  assert list(rates)[:5] == [
    *(f"layer 1, head {head}" for head in range(1, 5)),
    "layer 2, head 1",
  ]
  assert all(0 < rate <= 1 for rate in rates.values())


def test_unknown_alignment_gives_no_rate():
  experiment, examples = made("lookup")
  assert alignment_error_rates(experiment, None, examples) == {}


@pytest.mark.exhaustive
def test_model_without_attention_has_no_rate():
  experiment, examples = made("reverse", "none")
  params = experiment.initial_state().params
  assert alignment_error_rates(experiment, params, examples) == {}


@pytest.mark.exhaustive
def test_text_without_alignment_is_skipped(tmp_path):
  """As `evaluate --source --target` may: such pairs have no alignment."""
  config = base.get_config("additive")
  config.data = base.numbers()
  config.data.source_tokenizer.kind = "characters"
  config.data.train.num_examples = 300
  for split in config.data.splits.values():
    split.num_examples = 20
  experiment = make_experiment(
    parse(shrunk(config).to_dict()), tmp_path, train=True
  )
  text = readers.ParallelText(["nineteen men", "twelve"], ["십구 오", "십이"])
  source, target = experiment.data.encode(text).batch
  first, second = (
    experiment.data.gold_alignments(stripped(*x), stripped(*y))
    for x, y in ((source[:1], target[:1]), (source[1:], target[1:]))
  )
  assert first is None
  assert second.sure.any()
  params = experiment.initial_state().params
  rates = alignment_error_rates(
    experiment, params, experiment.data.encode(text)
  )
  assert set(rates) == {"attention"}
