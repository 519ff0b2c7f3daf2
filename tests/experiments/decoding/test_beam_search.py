"""Beam search against exhaustive enumeration and a plain search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import decoding
from experiments.data.batch import BOS, EOS, PAD
from experiments.decoding import Constraints, cache_growth
from experiments.models.transformer.model import Transformer
from tests.experiments.toys import (
  Lookup,
  all_hypotheses,
  divisor,
  followed,
  log_softmax,
  make_transformer,
  random_parameters,
  rnn,
  transformer,
)
from tests.matrix import sampled
from tests.meshes import make_mesh

VOCABULARY, MAX_LENGTH = 5, 4
MODELS = {"rnn": rnn(VOCABULARY), "transformer": transformer(VOCABULARY)}
SOURCE = np.array([[3, 4, 4, EOS], [4, 3, EOS, PAD]], np.int32)
HYPOTHESES = all_hypotheses(VOCABULARY, MAX_LENGTH)


@functools.cache
def parameters(name):
  """Larger than fresh parameters, at which all hypotheses are much alike."""
  return random_parameters(MODELS[name], SOURCE, SOURCE, scale=2)


def searched(model, params, source, **options):
  search = jax.jit(
    lambda params, source: decoding.beam(model, params, source, **options)
  )
  return jax.tree.map(np.asarray, search(params, source))


def lookup(vocabulary_size=6, seed=0, **options):
  model = Lookup(vocabulary_size, **options)
  rng = np.random.default_rng(seed)
  table = rng.normal(0, 2, (model.num_states, vocabulary_size))
  return model, {"table": table.astype(np.float32)}


def sources(count):
  return np.arange(3, 3 + count, dtype=np.int32)[:, None]


def permitted(constraints, hypothesis):
  words = [token for token in hypothesis if token not in (PAD, EOS)]
  size = constraints.no_repeat_ngram
  grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
  return (
    (EOS not in hypothesis or len(words) >= constraints.min_length)
    and not set(constraints.banned) & set(words)
    and (size == 0 or len(grams) == len(set(grams)))
  )


@sampled("name", MODELS, default=["rnn"])
@pytest.mark.parametrize(
  ("length_penalty", "constraints"),
  [
    pytest.param(0.0, Constraints(), marks=pytest.mark.exhaustive),
    pytest.param(1.0, Constraints(), marks=pytest.mark.exhaustive),
    (0.6, Constraints(min_length=2, no_repeat_ngram=2)),
  ],
)
def test_full_width_beam_ranks_all_hypotheses(
  name, length_penalty, constraints
):
  model, params = MODELS[name], parameters(name)
  hypotheses = searched(
    model,
    params,
    SOURCE,
    max_length=MAX_LENGTH,
    beam_size=len(HYPOTHESES),
    n_best=len(HYPOTHESES),
    length_penalty=length_penalty,
    constraints=constraints,
  )
  allowed = [
    hypothesis
    for hypothesis in HYPOTHESES
    if permitted(constraints, hypothesis)
  ]
  assert len(allowed) == (16 + 15 if constraints == Constraints() else 8 + 10)
  count = len(allowed)
  for row, source in enumerate(SOURCE):
    log_probs = followed(model, params, source, np.array(allowed))
    expected = dict(zip(map(tuple, allowed), log_probs))
    tokens = [
      tuple(hypothesis)
      for hypothesis in hypotheses.tokens[row, :count].tolist()
    ]
    assert set(tokens) == set(expected)
    np.testing.assert_allclose(
      hypotheses.log_probs[row, :count],
      [expected[t] for t in tokens],
      rtol=1e-5,
      atol=1e-5,
    )
    best_first = np.sort(log_probs / divisor(allowed, length_penalty))[::-1]
    np.testing.assert_allclose(
      hypotheses.scores[row, :count], best_first, rtol=1e-5, atol=1e-5
    )
  assert (hypotheses.scores[:, count:] == -np.inf).all()
  assert (hypotheses.tokens[:, count:] == PAD).all()


@sampled("name", MODELS, default=["rnn"])
def test_hypotheses_do_not_depend_on_padding_or_the_batch(name):
  model, params = MODELS[name], parameters(name)
  search = functools.partial(
    searched, model, params, max_length=7, beam_size=4, n_best=2
  )
  both = search(SOURCE)
  padded = search(np.pad(SOURCE, ((0, 2), (0, 3))))
  alone = search(SOURCE[1:, :3])
  for other, mine in ((padded, slice(0, 2)), (alone, slice(1, 2))):
    count = mine.stop - mine.start
    np.testing.assert_array_equal(other.tokens[:count], both.tokens[mine])
    np.testing.assert_allclose(
      other.scores[:count], both.scores[mine], rtol=1e-5, atol=1e-5
    )
  assert (padded.tokens[2:] == PAD).all()
  assert (padded.scores[2:] == -np.inf).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_single_beam_is_greedy_on_models(name):
  model, params = MODELS[name], parameters(name)
  greedy = jax.jit(
    lambda params: decoding.greedy(model, params, SOURCE, max_length=7)
  )(params)
  hypotheses = searched(model, params, SOURCE, max_length=7, beam_size=1)
  np.testing.assert_array_equal(hypotheses.tokens[:, 0], greedy)


@sampled(
  "constraints",
  [
    Constraints(),
    Constraints(min_length=3, banned=(4,)),
    Constraints(min_length=2, no_repeat_ngram=2),
    # No token is left after 3, 4 and 5: such a hypothesis ends as it is.
    Constraints(min_length=6, no_repeat_ngram=1),
  ],
  default=[Constraints()],
)
def test_single_beam_is_greedy_in_ties(constraints):
  model, params = lookup()
  # The largest of a row are mostly equal, or so close that their
  # log-probabilities are.
  table = np.minimum(np.round(params["table"]), 1).astype(np.float32) / 4
  nudged = np.random.default_rng(1).random(table.shape) < 0.5
  table = np.where(nudged, np.nextafter(table, np.float32(1)), table)
  params = {"table": table}
  source = sources(64)
  options = {"max_length": 8, "constraints": constraints}
  greedy = decoding.greedy(model, params, source, **options)
  hypotheses = searched(model, params, source, beam_size=1, **options)
  np.testing.assert_array_equal(hypotheses.tokens[:, 0], greedy)
  lengths = (hypotheses.tokens != PAD).sum(-1)
  assert (lengths == 3).all() == (constraints.no_repeat_ngram == 1)
  assert (hypotheses.scores > -np.inf).all()


def test_wide_beam_finds_a_better_hypothesis_than_greedy():
  model, params = lookup()
  source, candidates = sources(20), all_hypotheses(6, 4)
  options = {"max_length": 4, "length_penalty": 0.0}
  wide = searched(model, params, source, beam_size=81, **options)
  narrow = searched(model, params, source, beam_size=1, **options)
  best = [
    max(log_prob(model, params, row, hypothesis) for hypothesis in candidates)
    for row in source
  ]
  np.testing.assert_allclose(wide.scores[:, 0], best, rtol=1e-5, atol=1e-5)
  assert (narrow.scores < wide.scores - 0.1).sum() > 5


def log_prob(model, params, source, hypothesis):
  words = [token for token in hypothesis if token != PAD]
  return sum(
    log_softmax(model.logits(params["table"], source, words[:place]))[token]
    for place, token in enumerate(words)
  )


def plain_search(model, params, source, *, max_length, beam_size, alpha):
  """The same search of one source, never stopped early: (score, tokens)."""
  alive, finished = [(0.0, ())], []
  for length in range(1, max_length + 1):
    candidates = []
    for total, hypothesis in alive:
      logits = model.logits(params["table"], source, hypothesis)
      steps = log_softmax(logits)
      candidates += [
        (total + steps[token], (*hypothesis, token))
        for token in range(len(logits))
        if token not in (PAD, BOS)
      ]
    kept = sorted(candidates, reverse=True)[:beam_size]
    ended = [c for c in kept if c[1][-1] == EOS or length == max_length]
    finished += [(total / ((5 + len(a)) / 6) ** alpha, a) for total, a in ended]
    alive = [c for c in kept if c not in ended]
  return sorted(finished, reverse=True)


@sampled(
  ("alpha", "max_length"),
  [(0.0, 9), (0.6, 9), (1.0, 40), (3.0, 9)],
  default=[(0.6, 9), (1.0, 40)],
)
def test_early_stopping_is_exact(alpha, max_length):
  """Also for hypotheses so long that the cache grows while they do."""
  model, params = lookup(seed=1)
  params["table"][:, EOS] += 1 - max_length / 20
  source = sources(12)
  hypotheses = searched(
    model,
    params,
    source,
    max_length=max_length,
    beam_size=3,
    n_best=2,
    length_penalty=alpha,
  )
  lengths = (hypotheses.tokens != PAD).sum(-1)
  assert lengths.min() < max_length
  assert lengths.max() > (16 if max_length == 40 else 4)
  for row in range(len(source)):
    expected = plain_search(
      model,
      params,
      source[row],
      max_length=max_length,
      beam_size=3,
      alpha=alpha,
    )
    for rank in range(2):
      score, hypothesis = expected[rank]
      tokens = hypotheses.tokens[row, rank]
      assert tuple(tokens[tokens != PAD]) == hypothesis
      assert hypotheses.scores[row, rank] == pytest.approx(score, abs=1e-4)


def test_limits_are_maximum_lengths_of_single_sources():
  model, params = lookup()
  limits = np.array([2, 7, 4, 7], np.int32)
  source = sources(len(limits))
  options = {"beam_size": 3, "n_best": 2, "length_penalty": 1.0}
  both = searched(
    model, params, source, max_length=7, limits=jnp.array(limits), **options
  )
  for row, limit in enumerate(limits):
    alone = searched(
      model, params, source[row : row + 1], max_length=int(limit), **options
    )
    tokens = both.tokens[row]
    np.testing.assert_array_equal(tokens[:, :limit], alone.tokens[0])
    assert (tokens[:, limit:] == PAD).all()
    np.testing.assert_allclose(both.scores[row], alone.scores[0], rtol=1e-6)


def test_search_ends_when_no_better_hypothesis_is_possible():
  """Twelve steps are enough; the next would break every hypothesis."""
  options = {"max_length": 30, "beam_size": 3, "n_best": 2}
  results = []
  for breaks_at in (12, 1000):
    model, params = lookup(breaks_at=breaks_at)
    params["table"][:, EOS] += 4
    results.append(searched(model, params, sources(12), **options))
  np.testing.assert_array_equal(*(each.tokens for each in results))
  assert np.isfinite(results[0].scores).all()


@pytest.mark.exhaustive
def test_a_batch_of_padding_takes_no_step():
  model, params = lookup(breaks_at=0)
  hypotheses = searched(
    model, params, np.zeros((2, 1), np.int32), max_length=4, beam_size=3
  )
  assert (hypotheses.tokens == PAD).all()
  assert (hypotheses.scores == -np.inf).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("score", ["scaled_dot", "local_p", "forgetting"])
def test_growing_caches_do_not_change_hypotheses(score, monkeypatch):
  model = make_transformer(VOCABULARY, VOCABULARY, score=score, window=1)
  params = random_parameters(model, SOURCE, SOURCE, scale=2)
  options = {
    "max_length": 7,
    "beam_size": 3,
    "constraints": Constraints(min_length=5),
  }
  at_once = searched(model, params, SOURCE, **options)
  assert model.has_beam_steps == (score == "scaled_dot")
  monkeypatch.setattr(cache_growth, "_MIN_CAPACITY", 2)
  monkeypatch.setattr(cache_growth, "_MIN_ROWS", 1)
  grown = searched(model, params, SOURCE, **options)
  np.testing.assert_array_equal(grown.tokens, at_once.tokens)
  np.testing.assert_allclose(grown.scores, at_once.scores, rtol=1e-5, atol=1e-5)


def test_steps_of_whole_beams_equal_those_of_single_hypotheses(monkeypatch):
  model = make_transformer(
    VOCABULARY, VOCABULARY, positions="rotary", score="general"
  )
  monkeypatch.setattr(cache_growth, "_MIN_CAPACITY", 2)
  monkeypatch.setattr(cache_growth, "_MIN_ROWS", 1)
  source = np.array([[3, 4, 4, EOS], [4, 3, EOS, PAD], [4, EOS, PAD, PAD]])
  params = random_parameters(model, source, source, scale=2)
  options = {"max_length": 4, "beam_size": 4, "n_best": 4}
  whole = searched(model, params, source, **options)
  assert model.has_beam_steps
  monkeypatch.setattr(Transformer, "has_beam_steps", False)
  single = searched(model, params, source, **options)
  np.testing.assert_array_equal(whole.tokens, single.tokens)
  np.testing.assert_allclose(whole.scores, single.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_batch_may_be_sharded_over_devices():
  """By XLA, or each device its part, which exchanges nothing."""
  model, params = lookup()
  source = sources(16)
  search = functools.partial(
    decoding.beam, model, max_length=6, beam_size=3, n_best=2
  )
  mesh = make_mesh(data=8)
  rows = jax.P("data")
  divided = jax.device_put(source, jax.sharding.NamedSharding(mesh, rows))
  each = jax.shard_map(
    search, mesh=mesh, in_specs=(jax.P(), rows), out_specs=rows, check_vma=False
  )
  whole = jax.jit(search)(params, source)
  for hypotheses in (
    jax.jit(search)(params, divided),
    jax.jit(each)(params, divided),
  ):
    np.testing.assert_array_equal(hypotheses.tokens, whole.tokens)
    np.testing.assert_allclose(hypotheses.scores, whole.scores, rtol=1e-5)


def test_bfloat16_models_are_scored_in_float32():
  model = make_transformer(VOCABULARY, VOCABULARY, dtype=jnp.bfloat16)
  init = jax.eval_shape(model.init, jax.random.key(0), SOURCE, SOURCE)
  hypotheses = jax.eval_shape(
    lambda params: decoding.beam(
      model, params, SOURCE, max_length=40, beam_size=3
    ),
    init["params"],
  )
  assert hypotheses.scores.dtype == hypotheses.log_probs.dtype == jnp.float32


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"n_best": 4}, "n_best must be from 1 to beam_size=3, got 4"),
    ({"n_best": 0}, "n_best must be from 1 to beam_size=3, got 0"),
    ({"length_penalty": -1.0}, "length_penalty must be at least 0, got -1.0"),
    (
      {"constraints": Constraints(min_length=4)},
      "min_length must be less than max_length=4, got 4",
    ),
  ],
)
def test_option_out_of_range_is_named(options, message):
  model, params = lookup()
  options = {"max_length": 4, "beam_size": 3, **options}
  with pytest.raises(ValueError, match=message):
    decoding.beam(model, params, sources(2), **options)
