"""Greedy search, sampling, and constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import decoding
from experiments.data.batch import BOS, EOS, PAD
from experiments.decoding import Constraints, cache_growth
from experiments.decoding.constraints import constrained
from experiments.decoding.top_k import largest
from tests import matrix
from tests.experiments.toys import Lookup, transformer

VOCABULARY = 9


def lookup(**options):
  model = Lookup(VOCABULARY, **options)
  rng = np.random.default_rng(0)
  table = rng.normal(0, 2, (model.num_states, VOCABULARY))
  return model, {"table": table.astype(np.float32)}


def sources(count):
  return np.arange(3, 3 + count, dtype=np.int32)[:, None]


def sampled(model, params, source, seed=0, **options):
  draw = jax.jit(
    lambda params, rng: decoding.sample(model, params, source, rng, **options)
  )
  return np.asarray(draw(params, jax.random.key(seed)))


def likeliest(model, params, source, **options):
  follow = jax.jit(
    lambda params: decoding.greedy(model, params, source, **options)
  )
  return np.asarray(follow(params))


def searched(model, params, source, **options):
  search = jax.jit(
    lambda params: decoding.beam(
      model, params, source, beam_size=3, n_best=3, **options
    )
  )
  return np.concatenate(search(params).tokens)


DECODERS = {"greedy": likeliest, "sample": sampled, "beam": searched}


@pytest.fixture(params=list(DECODERS))
def decoder(request):
  return DECODERS[request.param]


def decoders(*default):
  """Uses the fixture `decoder`; names outside `default` are exhaustive."""
  return matrix.sampled("decoder", DECODERS, default=default, indirect=True)


def words(row):
  return [int(token) for token in row if token not in (PAD, EOS)]


@decoders("greedy", "beam")
def test_predictions_end_with_eos_or_at_max_length(decoder):
  model, params = lookup()
  params["table"][:, EOS] += 1
  predictions = decoder(model, params, sources(64), max_length=6)
  lengths = (predictions != PAD).sum(-1)
  assert lengths.min() < 4 < 6 == lengths.max()
  for row, length in zip(predictions, lengths):
    assert (row[length:] == PAD).all()
    assert not {PAD, BOS, EOS} & set(row[: length - 1].tolist())
    assert length == 6 or row[length - 1] == EOS


@decoders("greedy", "beam")
def test_predictions_have_the_minimum_length(decoder):
  model, params = lookup()
  params["table"][:, EOS] += 3
  for least in (0, 3):
    rules = Constraints(min_length=least)
    predictions = decoder(
      model, params, sources(64), max_length=6, constraints=rules
    )
    lengths = [len(words(row)) for row in predictions]
    assert min(lengths) == least


@decoders("beam")
def test_ngrams_are_not_repeated(decoder):
  model, params = lookup()
  params["table"][:, [3, 4]] += 3
  for size in (0, 2):  # others: see the test with a loop
    rules = Constraints(no_repeat_ngram=size)
    predictions = decoder(
      model, params, sources(32), max_length=10, constraints=rules
    )
    repeated = 0
    for row in predictions:
      grams = list(zip(*(words(row)[i:] for i in range(size or 2))))
      repeated += len(grams) - len(set(grams))
    assert (repeated > 0) == (size == 0)


def test_banned_tokens_are_not_chosen(decoder):
  model, params = lookup()
  for banned in ((), (3, 7)):
    rules = Constraints(banned=banned)
    predictions = decoder(
      model, params, sources(64), max_length=6, constraints=rules
    )
    assert np.isin(predictions, (3, 7)).any() == (banned == ())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_constraints_match_a_loop(size):
  rng = np.random.default_rng(size)
  tokens = rng.integers(3, 6, (2, 7, 10))
  rules = Constraints(min_length=4, no_repeat_ngram=size, banned=(6,))
  log_probs = rng.normal(size=(2, 7, VOCABULARY)).astype(np.float32)
  check = jax.jit(lambda length: constrained(rules, tokens, length, log_probs))
  for length in range(10):
    expected = log_probs.copy()
    expected[..., [PAD, BOS, 6]] = -np.inf
    if length < 4:
      expected[..., EOS] = -np.inf
    for place in np.ndindex(2, 7):
      row = tokens[place][:length].tolist()
      grams = {tuple(row[i : i + size]) for i in range(length - size + 1)}
      for token in range(VOCABULARY):
        last = (*row, token)[-size:]
        if len(last) == size and last in grams:
          expected[(*place, token)] = -np.inf
    np.testing.assert_array_equal(check(length), expected)


@matrix.sampled_product(
  ("count", "shape"),
  ([1, 2, 5], [(3, 5), (40,), (2, 3, 640), (2, 1000), (3, 1, 1025)]),
  default=[(2, (3, 1, 1025)), (5, (2, 1000))],
)
def test_largest_matches_top_k_in_ties(shape, count):
  rng = np.random.default_rng(0)
  values = rng.integers(0, 300, shape).astype(np.float32)
  values[values < 50] = -np.inf
  expected = jax.lax.top_k(values, count)
  for actual, known in zip(largest(jnp.asarray(values), count), expected):
    np.testing.assert_array_equal(actual, known)
  nothing = jnp.full(shape, -jnp.inf)
  assert (np.asarray(largest(nothing, count)[1]) == np.arange(count)).all()


def test_top_1_sampling_is_greedy():
  model, params = lookup()
  greedy = likeliest(model, params, sources(64), max_length=6)
  drawn = sampled(model, params, sources(64), max_length=6, top_k=1)
  np.testing.assert_array_equal(drawn, greedy)


@matrix.sampled(
  ("temperature", "top_k"),
  [(1.0, 0), (0.5, 0), (2.0, 0), (1.0, 3), (1.0, 50)],
  default=[(0.5, 0), (1.0, 3)],
)
def test_samples_follow_the_model_distribution(temperature, top_k):
  model, params = lookup()
  count = 20_000
  source = np.full((count, 1), 5, np.int32)
  tokens = sampled(
    model, params, source, max_length=1, temperature=temperature, top_k=top_k
  )
  odds = np.exp(model.logits(params["table"], source[0], ()) / temperature)
  odds[[PAD, BOS]] = 0
  if top_k == 3:
    odds[odds < np.sort(odds)[-3]] = 0
  expected = odds / odds.sum()
  frequency = np.bincount(tokens[:, 0], minlength=VOCABULARY) / count
  deviation = np.sqrt(expected * (1 - expected) / count)
  assert (np.abs(frequency - expected) <= 4 * deviation + 1e-9).all()


def test_every_step_uses_another_rng():
  model, params = lookup()
  params["table"][:] = 0
  params["table"][:, EOS] = -100
  count = 6000
  tokens = sampled(
    model, params, np.full((count, 1), 5, np.int32), max_length=2
  )
  same = (tokens[:, 0] == tokens[:, 1]).mean()
  assert same == pytest.approx(1 / 6, abs=0.02)


@decoders("greedy", "beam")
def test_prediction_ends_if_no_token_is_allowed(decoder):
  model, params = lookup()
  rules = Constraints(min_length=7, no_repeat_ngram=1, banned=(3, 4))
  predictions = decoder(
    model, params, sources(16), max_length=8, constraints=rules
  )
  assert (np.sort(predictions) == [0, 0, 0, 0, 5, 6, 7, 8]).all()


@decoders("greedy", "beam")
def test_rows_of_padding_take_no_step(decoder):
  model, params = lookup(breaks_at=0)
  predictions = decoder(model, params, np.zeros((2, 1), np.int32), max_length=4)
  assert (predictions == PAD).all()


def test_decoding_stops_when_all_predictions_have_ended():
  steps = []

  class Counted(Lookup):
    def step(self, memory, carry, token):
      jax.debug.callback(lambda: steps.append(1))
      return super().step(memory, carry, token)

  _, params = lookup()
  params["table"][:, EOS] += 4
  predictions = likeliest(
    Counted(VOCABULARY), params, sources(16), max_length=9
  )
  jax.effects_barrier()
  longest = (predictions != PAD).sum(-1).max()
  assert len(steps) == longest < 9


@pytest.mark.exhaustive
def test_growing_caches_do_not_change_predictions(monkeypatch):
  model = transformer(VOCABULARY)
  source = np.array([[3, 4, 5, EOS], [7, 8, EOS, PAD]])
  params = jax.jit(model.init)(jax.random.key(1), source, source)["params"]
  params = jax.tree.map(lambda leaf: 3 * leaf, params)
  rules = Constraints(min_length=7)
  predictions = []
  for capacity in (16, 2):
    monkeypatch.setattr(cache_growth, "_MIN_CAPACITY", capacity)
    monkeypatch.setattr(cache_growth, "_MIN_ROWS", 1)
    greedy = jax.jit(
      lambda params: decoding.greedy(
        model, params, source, max_length=8, constraints=rules
      )
    )
    predictions.append(greedy(params))
  np.testing.assert_array_equal(*predictions)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ({"top_k": -1}, "top_k must be at least 0, 0 for all, got -1"),
    (
      {"constraints": Constraints(min_length=4)},
      "min_length must be less than max_length=4, got 4",
    ),
    (
      {"constraints": Constraints(banned=(9,))},
      r"banned must be token ids below 9, got \(9,\)",
    ),
  ],
)
def test_option_out_of_range_is_named(options, message):
  model, params = lookup()
  rng = jax.random.key(0)
  with pytest.raises(ValueError, match=message):
    decoding.sample(model, params, sources(2), rng, max_length=4, **options)
