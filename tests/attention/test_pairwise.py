"""Functions as scores: only those of pairs give the same result on blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import scores
from attention.implementations import Pallas
from attention.implementations.blockwise import Blockwise
from attention.scores.pairwise import follows_leading
from tests.attention.comparison import close, jitted
from tests.attention.oracle import draw, loop_attend
from tests.matrix import sampled

attend = jitted(attention.attend)
TILES = Blockwise(query_block=2, key_block=3)
WEIGHT = jnp.cos(jnp.arange(16.0).reshape(4, 4))
ALL_PAIRS = jnp.cos(jnp.arange(35.0).reshape(5, 7))
TABLE = jnp.sin(jnp.arange(80.0).reshape(20, 4))


def dot(query, key):
  return query @ key.mT


def _keys(key):
  return key.shape[-2]


def _counted(query, key):
  def step(number, counts):
    return counts.at[number].set(number)

  counts = jax.lax.fori_loop(0, _keys(key), step, jnp.zeros(_keys(key)))
  return dot(query, key) + counts


def _modular(query, key):
  shape = query.shape[-2], _keys(key)
  return dot(query, key) + jnp.arange(shape[0] * shape[1]).reshape(shape) % 7


def _shifted_range(query, key):
  return dot(query, key) + jnp.arange(1 - _keys(key), _keys(key))[: _keys(key)]


def _nonzero(query, key):
  places = jnp.nonzero(jnp.ones(_keys(key)), size=_keys(key))[0]
  return dot(query, key) + places


def _smoothed(query, key):
  def smooth(channel):
    return jnp.convolve(channel, jnp.ones(3), "same")

  return dot(query, jax.vmap(smooth, 1, 1)(key))


NOT_PAIRWISE = {
  "arange": lambda q, k: dot(q, k) - jnp.arange(_keys(k)),
  "NumPy's arange": lambda q, k: dot(q, k) - np.arange(_keys(k)),
  "arange of queries": jax.jit(
    lambda q, k: dot(q, k) * jnp.arange(q.shape[-2])[:, None]
  ),
  "arange from 1": lambda q, k: dot(q, k) + jnp.arange(_keys(k) + 1)[1:],
  "shifted arange": _shifted_range,
  "linspace": lambda q, k: dot(q, k) + jnp.linspace(0, 3, _keys(k)),
  "modulo": _modular,
  "nonzero": _nonzero,
  "loop": _counted,
  "cumsum": lambda q, k: dot(q, k) + jnp.cumsum(jnp.ones(_keys(k))),
  "tril": lambda q, k: jnp.tril(dot(q, k)),
  "random": lambda q, k: (
    dot(q, k) + jax.random.normal(jax.random.key(0), (_keys(k),))
  ),
  "wrapped": scores.soft_cap(
    scores.as_score(lambda q, k: dot(q, k) + jnp.linspace(0, 3, _keys(k))), 9.0
  ),
  "modified": scores.modified(
    scores.as_score(lambda q, k: dot(q, k) - jnp.arange(_keys(k))),
    lambda scores, i, j: scores - abs(i - j),
  ),
  "roll": lambda q, k: dot(q, jnp.roll(k, 1, axis=-2)),
  "flip": lambda q, k: dot(q, k[::-1]),
  "sort": lambda q, k: dot(q, jnp.sort(k, axis=-2)),
  "convolution": _smoothed,
  "softmax": lambda q, k: jax.nn.softmax(dot(q, k)),
  "mean": lambda q, k: dot(q, k - k.mean(axis=-2, keepdims=True)),
  "norm of all": lambda q, k: dot(q, k) / jnp.linalg.norm(k),
  "products of keys": lambda q, k: q @ (k.mT @ k) @ k.mT,
  "first query": lambda q, k: dot(q[:1], k) + 0.0 * dot(q, k),
  "matrix decomposition": lambda q, k: dot(q, jnp.linalg.qr(k)[0]),
  "callback": lambda q, k: jax.pure_callback(
    lambda q, k: q @ k.mT, jnp.zeros((q.shape[-2], _keys(k))), q, k
  ),
  "largest of modified": scores.modified(
    scores.dot(),
    lambda scores, i, j: jnp.where(
      scores >= jax.lax.top_k(scores, 2)[0][..., -1:], scores, -jnp.inf
    ),
  ),
  "number of modified": scores.soft_cap(
    scores.modified(
      scores.dot(), lambda scores, i, j: scores * jnp.log(scores.shape[-1])
    ),
    9.0,
  ),
  "sum of positional": scores.positional(
    lambda q, k, i, j: dot(q, k - k.sum(-2, keepdims=True)) + i - j
  ),
  "number of keys": lambda q, k: dot(q, k) / _keys(k),
  "array of all pairs": lambda q, k: dot(q, k) + ALL_PAIRS,
  "array of the number": lambda q, k: dot(q, k) * np.full((1, 1), 1 / _keys(k)),
  "reshaped keys": lambda q, k: q @ k.reshape(k.shape[::-1]),
  "approximate maximum": lambda q, k: (
    dot(q, k) - jax.lax.approx_max_k(dot(q, k), 1)[0]
  ),
  "other random": lambda q, k: (
    dot(q, k)
    + jax.random.uniform(jax.random.key(0, impl="rbg"), (len(q), _keys(k)))
  ),
  "softmax within QK norm": scores.qk_norm(
    scores.modified(scores.dot(), lambda scores, i, j: jax.nn.softmax(scores))
  ),
  "softmax within a window": scores.local(
    scores.as_score(lambda q, k: jax.nn.softmax(dot(q, k))), 3.0
  ),
}

PAIRWISE = {
  "general": lambda q, k: q @ WEIGHT @ k.mT,
  "distance": lambda q, k: -abs(q[:, None] - k[None]).sum(-1),
  "cosine": lambda q, k: dot(
    q / jnp.linalg.norm(q, axis=-1, keepdims=True), jax.nn.standardize(k)
  ),
  "two maps of vectors": lambda q, k: jax.vmap(
    lambda one: jax.vmap(lambda other: jnp.tanh(one @ WEIGHT) @ other)(k)
  )(q),
  "loop over queries": lambda q, k: jax.lax.map(lambda one: k @ one, q),
  "loop over features": lambda q, k: jax.lax.scan(
    lambda total, each: (total + each[0][:, None] * each[1][None], None),
    jnp.zeros((q.shape[-2], _keys(k))),
    (q.T, k.T),
  )[0],
  "loop over indices": lambda q, k: jax.lax.fori_loop(
    0,
    4,
    lambda n, total: total + q[..., n][:, None] * k[..., n][None],
    jnp.zeros((q.shape[-2], _keys(k))),
  ),
  "map of indices": lambda q, k: jax.vmap(
    lambda n: q[..., n][:, None] * k[..., n][None]
  )(jnp.arange(4)).sum(0),
  "concatenated features": lambda q, k: dot(
    jnp.concatenate([q, q * q], -1), jnp.concatenate([k, k], -1)
  ),
  "numbered features": lambda q, k: dot(
    q, k * jnp.arange(4)[None] * np.arange(4)[None]
  ),
  "looked up": lambda q, k: dot(
    TABLE[jnp.clip(abs(q[:, 0] * 9), 0, 19).astype(int)], k
  ),
  "joined and divided features": lambda q, k: dot(
    jnp.square(q.reshape(-1)).reshape(q.shape),
    k.reshape(-1, 2).sum(-1).repeat(2).reshape(k.shape),
  ),
  "divided keys": lambda q, k: dot(
    q, (2.0 * k.reshape(-1, 1, len(k), 2, 2)).reshape(k.shape)
  ),
  "within a window": scores.local(
    scores.as_score(lambda q, k: jnp.tanh(dot(q, k))), 9.0
  ),
  "one feature set": lambda q, k: dot(q.at[:, 0].set(0.0), k[:, ::-1]),
  "hidden": lambda q, k: jnp.where(dot(q, k) > 0, dot(q, k), -jnp.inf),
  "constant": lambda q, k: jnp.ones((q.shape[-2], _keys(k))),
}


@pytest.fixture(autouse=True)
def _ranks_may_differ():
  with jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.parametrize("name", NOT_PAIRWISE)
@pytest.mark.parametrize("size", [4, 6, 7])  # other sizes near the lengths
def test_function_of_other_tokens_is_refused(name, size):
  query, key = (jnp.asarray(each) for each in draw(14, (5, size), (7, size)))
  with pytest.raises(ValueError, match=r"pairs.*attention\.scores\.positional"):
    attend(query, key, key, score=NOT_PAIRWISE[name])


@pytest.mark.parametrize("name", PAIRWISE)
@sampled("length", [4, 1], default=[4])
def test_function_of_pairs_is_accepted(name, length):
  score = PAIRWISE[name]
  implementations = "reference", TILES

  @jax.jit
  def run(query, key):
    return score(query, key), *(
      attend(query, key, key, score=score, implementation=each)
      for each in implementations
    )

  query, key = draw(15, (length, 4), (4, 4))
  table, *contexts = run(query, key)
  want = loop_attend(np.asarray(table), key)[0]
  for got in contexts:
    close(got, want, rtol=1e-4, atol=1e-5)


# Scores that read the axis of heads, [H, T, S], and arrays of heads.
OF_HEADS = {
  "slopes by the number of heads": scores.modified(
    scores.dot(),
    lambda scores, i, j: (
      scores
      - 0.1 * jnp.arange(1, scores.shape[-3] + 1)[:, None, None] * abs(i - j)
    ),
  ),
  "numbered heads": lambda q, k: dot(q, k) * jnp.arange(len(q))[:, None, None],
  "mean over heads": lambda q, k: dot(q, k) - dot(q, k).mean(0),
  "softmax over heads": lambda q, k: jax.nn.softmax(dot(q, k), axis=0),
  "other heads": lambda q, k: dot(q, jnp.roll(k, 1, axis=0)),
  "number of heads": lambda q, k: dot(q, k) / len(q),
}


def arrays(*shapes, seed):
  return map(jnp.asarray, draw(seed, *shapes))


def nearer(scores, query_positions, key_positions):
  return scores - 0.1 * abs(query_positions - key_positions)


OF_EACH_HEAD = {
  "function": dot,
  "indices": scores.modified(
    scores.dot(),
    lambda scores, batch, head, i, j: scores - head * abs(i - j),
    with_indices=True,
  ),
  "cap": scores.soft_cap(scores.dot(), 3.0),
  "additive": scores.modified(
    scores.additive(*arrays((4, 8), (4, 8), (8,), seed=17)), nearer
  ),
  "weights of heads": scores.modified(
    scores.additive(*arrays((4, 4, 8), (4, 4, 8), (4, 8), seed=17)), nearer
  ),
  "wrappers with numbers of heads": scores.forgetting(
    scores.temperature(scores.as_score(dot), jnp.arange(1.0, 5.0)),
    -jnp.ones((4, 7)),
  ),
  "predicted positions": scores.local(
    scores.modified(scores.dot(), nearer), 3.0, *arrays((4, 8), (8,), seed=18)
  ),
}


@pytest.mark.parametrize("name", OF_HEADS)
def test_tiles_do_not_divide_the_heads_that_a_function_reads(name):
  score = OF_HEADS[name]
  query, key = (jnp.asarray(each) for each in draw(16, (4, 5, 4), (4, 7, 4)))
  tiles = Blockwise(query_block=2, key_block=3, leading_block=1)

  @jax.jit
  def run(query, key):
    return [
      attend(query, key, key, score=score, implementation=each)
      for each in (tiles, "reference")
    ]

  close(*run(query, key), rtol=1e-4, atol=1e-5)
  with pytest.raises(NotImplementedError, match="a score of one head"):
    attend(
      *(query, key, key), score=score, implementation=Pallas(interpret=True)
    )


@pytest.mark.parametrize("name", OF_EACH_HEAD)
def test_tiles_may_divide_the_heads_of_other_functions(name):
  score = scores.as_score(OF_EACH_HEAD[name])
  query, key = (jnp.asarray(each) for each in draw(16, (4, 5, 4), (4, 7, 4)))
  assert follows_leading(score, query, key)
