"""Batched decoding: predictions do not depend on the rest of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments import decoding
from experiments.config import MeshConfig
from experiments.data.batch import EOS, PAD
from experiments.decoding.batching import (
  Search,
  by_length,
  make_predictor,
  padded_batch,
)
from experiments.distributed import mesh as mesh_lib
from tests.experiments.toys import Lookup

VOCABULARY = 50


class Echo(nn.Module):
  """Predicts the source, token by token."""

  def start(self, source, max_length):
    return source, jnp.zeros((), jnp.int32)

  def step(self, memory, place, token):
    said = jax.lax.dynamic_index_in_dim(memory, place, axis=1, keepdims=False)
    logits = 20 * jax.nn.one_hot(said, VOCABULARY)
    return place + 1, logits, jnp.zeros((*token.shape, 1, 1))


def sources(count, longest, seed=0):
  """Sources of all lengths, EOS included, in any order."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, longest + 1, count)
  tokens = rng.integers(EOS + 1, VOCABULARY, (count, longest))
  place = np.arange(longest)
  tokens = np.where(place < lengths[:, None], tokens, PAD)
  tokens[np.arange(count), lengths - 1] = EOS
  return tokens.astype(np.int32)


def make_test_predictor(
  model, search, max_prediction_length=lambda width: width, devices=1
):
  sizes = MeshConfig(data=devices, fsdp=1, sequence=1, tensor=1)
  mesh = mesh_lib.make_mesh(sizes)
  return make_predictor(model, mesh, search, max_prediction_length)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("search", [Search(), Search(beam_size=2)])
def test_predictions_are_in_the_order_of_their_sources(search, devices):
  source, done = sources(3001, longest=70), []
  predict = make_test_predictor(Echo(), search, devices=devices)
  predictions = predict({}, source, done.append)
  assert predictions.tokens.shape == (3001, 1, 70)
  np.testing.assert_array_equal(predictions.tokens[:, 0], source)
  rows = {(1, 1): 64, (3, 1): 66, (1, 2): 64, (3, 2): 66}[
    devices, search.beam_size
  ]
  # Several devices decode one batch after another, the longest sources first.
  in_order = done if devices > 1 else sorted(done)
  assert in_order == [3001 % rows] + [rows] * (3001 // rows)
  assert predictions.seconds > 0


@pytest.mark.parametrize("search", [Search(), Search(beam_size=2, n_best=2)])
def test_single_source_is_decoded(search):
  source = sources(1, longest=40)
  source = source[:, : (source != PAD).sum()]
  predictions = make_test_predictor(Echo(), search)({}, source)
  assert predictions.tokens.shape[:2] == (1, search.n_best)
  np.testing.assert_array_equal(predictions.tokens[:, 0], source)
  assert predictions.scores.shape == (1, search.n_best)


def test_no_sources_give_no_predictions():
  predictions = make_test_predictor(Echo(), Search())(
    {}, np.zeros((0, 7), np.int32)
  )
  assert predictions.tokens.shape[:2] == (0, 1)
  assert predictions.seconds == 0


@pytest.mark.parametrize("devices", [1, 2])
def test_each_width_is_compiled_once_for_the_rows_of_a_device(devices):
  starts = []

  class Counted(Echo):
    def start(self, source, max_length):
      starts.append(source.shape)
      return super().start(source, max_length)

  # So short that a prediction is decoded in one stage, and of one length.
  predict = make_test_predictor(
    Counted(), Search(), lambda length: 9, devices=devices
  )
  source = sources(3000, longest=100)
  predict({}, source)
  predict({}, source[:1000])
  assert starts == [(64 // devices, width) for width in (100, 96, 64, 32)]


def test_n_best_predictions_match_a_direct_beam_search():
  model = Lookup(VOCABULARY)
  table = np.random.default_rng(0).normal(0, 2, (97, VOCABULARY))
  table[:, EOS] += 3
  params = {"table": table.astype(np.float32)}
  source = sources(600, longest=40)
  # Lookup reads a source's first token only, so a width changes nothing.
  search = Search(beam_size=3, n_best=2, length_penalty=0.6)
  predictions = make_test_predictor(model, search, lambda width: 9)(
    params, source
  )
  direct = jax.jit(
    lambda source: decoding.beam(
      model,
      params,
      source,
      max_length=9,
      beam_size=3,
      n_best=2,
      length_penalty=0.6,
    )
  )(source)
  np.testing.assert_array_equal(predictions.tokens, direct.tokens)
  np.testing.assert_allclose(predictions.scores, direct.scores, rtol=1e-5)
  assert len(np.unique(predictions.tokens[:, 0], axis=0)) > 20


@pytest.mark.parametrize(
  "search",
  [Search(), Search(beam_size=2), Search(temperature=1.0)],
  ids=["greedy", "beam", "sampling"],
)
def test_the_maximum_length_is_that_of_the_own_source(search):
  source = sources(40, longest=20)
  never_ends = np.zeros((97, VOCABULARY), np.float32)
  never_ends[:, EOS] = -np.inf
  predictions = make_test_predictor(
    Lookup(VOCABULARY), search, lambda length: length + 3
  )({"table": never_ends}, source)
  lengths = (predictions.tokens[:, 0] != PAD).sum(1)
  np.testing.assert_array_equal(lengths, (source != PAD).sum(1) + 3)


def test_samples_depend_on_the_seed_and_the_batch():
  model = Lookup(VOCABULARY)
  params = {"table": np.zeros((97, VOCABULARY), np.float32)}
  source = np.full((512, 2), [5, EOS], np.int32)
  samples = {
    (seed, first): make_test_predictor(
      model, Search(temperature=1.0, seed=seed), lambda width: 6
    )(params, source, first=first).tokens
    for seed, first in ((1, 0), (2, 0), (1, 512))
  }
  again = make_test_predictor(
    model, Search(temperature=1.0, seed=1), lambda width: 6
  )
  np.testing.assert_array_equal(samples[1, 0], again(params, source).tokens)
  batches = [half for each in samples.values() for half in np.split(each, 2)]
  assert len({batch.tobytes() for batch in batches}) == 6


def test_batches_are_full_and_contain_each_source_once():
  source = sources(1000, longest=100)
  lengths = (source != PAD).sum(1)
  batches = list(by_length(96, source))
  members = np.concatenate([members for members, _ in batches])
  assert sorted(members.tolist()) == list(range(1000))
  assert (np.diff(lengths[members]) >= 0).all()
  assert [len(members) for members, _ in batches] == [96] * 10 + [40]
  for members, part in batches:
    longest = lengths[members].max()
    assert part.shape == (96, min(-(-longest // 32) * 32, 100))
    count, width = len(members), part.shape[1]
    np.testing.assert_array_equal(part[:count], source[members, :width])
    assert (part[count:] == PAD).all()


@pytest.mark.parametrize(
  ("rows", "width", "shape"),
  [(3, 1, (3, 32)), (2, 33, (2, 40)), (5, 0, (5, 32)), (2, 40, (2, 40))],
)
def test_filled_adds_rows_and_keeps_all_tokens(rows, width, shape):
  array = np.arange(4, 84).reshape(2, 40)
  array[0, width // 2 :] = PAD
  array[1, width:] = PAD
  result = padded_batch(array, rows)
  assert result.shape == shape
  np.testing.assert_array_equal(result[:2], array[:, : shape[1]])
  assert (result[2:] == PAD).all()
