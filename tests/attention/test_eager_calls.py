"""Calls outside of `jax.jit`: equal ones share a compiled program."""

import dataclasses
import gc
import logging
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, names, normalizers, scores
from attention.implementations.blockwise import Blockwise, flagged_rows
from attention.modules import MultiHeadAttention
from tests.attention.oracle import draw, single
from tests.matrix import sampled

SMALL = Blockwise(query_block=2, key_block=3)


def compiled(function):
  """The names of the programs that a call of `function` compiles."""
  names = []
  handler = logging.Handler()
  handler.emit = lambda record: names.append(record.getMessage())
  logger = logging.getLogger("jax._src.interpreters.pxla")
  level = logger.level
  logger.addHandler(handler)
  logger.setLevel(logging.DEBUG)
  try:
    function()
  finally:
    logger.removeHandler(handler)
    logger.setLevel(level)
  return [name for name in names if name.startswith("Compiling ")]


def tokens(seed=0):
  return single(seed, *[(2, 7, 4)] * 3)


def additive(seed):
  weight, vector = draw(seed, (4, 4), (4,))
  return scores.additive(*(jnp.asarray(x) for x in (weight, weight, vector)))


def distance(query, key):
  gap = query[..., :, None, :] - key[..., None, :, :]
  return -jnp.sum(jax.nn.relu(gap), axis=-1)


def lengths(seed):
  return masks.padding(jnp.array([3 + seed, 7]))


def squared_relu(seed):
  scale = jnp.float32(seed + 1.0)
  return lambda scores: scale * jnp.square(jnp.maximum(scores, 0.0))


CALLS = {
  "dot": lambda seed: {"mask": masks.causal()},
  "additive": lambda seed: {"score": additive(seed), "mask": lengths(seed)},
  "bias": lambda seed: {
    "bias": biases.alibi(2) + 0.1 * tokens(seed)[0][:, :, :1]
  },
  "function": lambda seed: {"score": distance},
  "dropout": lambda seed: {"dropout_rate": 0.1, "rng": jax.random.key(seed)},
  "entmax": lambda seed: {
    "normalizer": normalizers.entmax(),
    "mask": masks.causal(),
  },
  "squared relu": lambda seed: {"normalizer": squared_relu(seed)},
}


@sampled("name", CALLS, default=["dot", "squared relu"])
def test_a_second_call_with_other_arrays_compiles_nothing(name):
  def value_and_gradient(seed):
    arguments = CALLS[name](seed)

    def loss(*tokens):
      context = attend(*tokens, implementation=SMALL, **arguments)
      return jnp.sum(context**2)

    loss(*tokens(seed))
    return jax.grad(loss, (0, 1, 2))(*tokens(seed))

  first = compiled(lambda: value_and_gradient(0))
  assert first
  assert not compiled(lambda: value_and_gradient(1))


SMALL_CALLS = [
  (option, name)
  for option, literal in (
    ("score", names.ScoreName),
    ("score", names.PositionalScoreName),
    ("normalizer", names.NormalizerName),
  )
  for name in typing.get_args(literal)
]


@sampled(
  ("option", "name"),
  SMALL_CALLS,
  default=[("score", "additive"), ("score", "shaw"), ("normalizer", "entmax")],
)
def test_a_third_small_call_compiles_nothing(option, name):
  (tokens,) = single(0, (2, 9, 8))
  module = MultiHeadAttention(2, **{option: name})
  variables = module.init(jax.random.key(0), tokens)

  def gradient():
    def loss(variables):
      return jnp.sum(module.apply(variables, tokens, mask=masks.causal()))

    return jax.grad(loss)(variables)

  gradient()
  gradient()
  assert not compiled(gradient)


def test_a_changed_attribute_of_a_callable_changes_the_result():
  class Scaled:
    scale = 1.0

    def __call__(self, query, key):
      return self.scale * jnp.einsum("...td,...sd->...ts", query, key)

  score, given = Scaled(), tokens()
  before = attend(*given, score=score, implementation=SMALL)
  score.scale = jnp.float32(2.0)
  array = attend(*given, score=score, implementation=SMALL)
  score.scale = 3.0
  number = attend(*given, score=score, implementation=SMALL)
  for got, scale in ((before, 1.0), (array, 2.0), (number, 3.0)):
    expected = attend(
      *given, score=scores.scaled_dot(scale), implementation=SMALL
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def with_slope(slope):
  """The identity with another derivative, by a rule that captures it."""

  @jax.custom_jvp
  def identity(numbers):
    return numbers

  identity.defjvp(lambda primals, tangents: (*primals, slope * tangents[0]))
  return identity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sloped(scores.Score):
  slope: jax.Array

  def pair(self, query, key):
    return with_slope(self.slope)(query @ key.mT)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlopedSoftmax(normalizers.Normalizer):
  slope: jax.Array

  def __call__(self, scores):
    return jax.nn.softmax(with_slope(self.slope)(scores))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlopedDistance(biases.Bias):
  slope: jax.Array
  factor: jax.Array

  def block(self, rows, columns, rank):
    gap = jnp.float32(rows[:][:, None] - columns[:][None])
    return with_slope(self.slope)(self.factor * gap).reshape(1, *gap.shape)


def sloped(function, query, key):
  return function(query @ key.mT)


WITH_RULES = {
  "score": lambda slope, _: {"score": Sloped(slope)},
  "partial": lambda slope, _: {
    "score": jax.tree_util.Partial(sloped, with_slope(slope))
  },
  "normalizer": lambda slope, _: {"normalizer": SlopedSoftmax(slope)},
  "bias": lambda slope, factor: {"bias": SlopedDistance(slope, factor)},
}


@pytest.mark.parametrize("name", WITH_RULES)
def test_a_rule_that_captured_another_array_is_another_program(name):
  query, key, value = tokens()

  def loss(number, slope):
    arguments = WITH_RULES[name](slope, number)
    context = attend(
      number * query, key, value, implementation=SMALL, **arguments
    )
    return jnp.sum(context**2)

  gradients = [jax.grad(loss)(0.5, jnp.float32(slope)) for slope in (1.0, 3.0)]
  assert not np.isclose(*gradients, rtol=1e-3)


def test_a_mask_that_calls_another_function_is_another_program():
  def every_second(first):
    def visible(*positions):
      return np.add(*positions) % 2 == first

    def function(*positions):
      shape = jnp.broadcast_shapes(*map(jnp.shape, positions))
      shape = jax.ShapeDtypeStruct(shape, bool)
      return jax.pure_callback(
        visible, shape, *positions, vmap_method="expand_dims"
      )

    return masks.where(function)

  contexts = [
    attend(*tokens(), mask=every_second(first), implementation="blockwise")
    for first in (0, 1)
  ]
  assert not np.allclose(*contexts)


def test_a_function_and_its_arrays_are_not_kept_alive():
  def make_score():
    weight = jnp.ones((4, 4))

    def score(query, key):
      return jnp.einsum("...td,...sd->...ts", query @ jax.nn.relu(weight), key)

    return score, weight

  score, weight = make_score()
  attend(*tokens(), score=score, implementation=SMALL)
  kept = weakref.ref(score), weakref.ref(weight)
  del score, weight
  gc.collect()
  assert [each() for each in kept] == [None, None]


def test_different_masks_of_equal_shape_have_different_results():
  given = tokens()
  results = [
    attend(*given, mask=mask, implementation=SMALL)
    for mask in (masks.causal(), masks.causal(1), ~masks.causal(1))
  ]
  for left, right in ((0, 1), (1, 2), (0, 2)):
    assert not np.allclose(results[left], results[right])


def test_gradients_visit_no_pairs_to_find_nan_if_all_tokens_are_finite(
  monkeypatch,
):
  def unexpected(*arguments):
    raise AssertionError("searched all pairs")

  monkeypatch.setattr(flagged_rows, "_compiled_rows_attending", unexpected)

  def loss(*tokens):
    return jnp.sum(attend(*tokens, mask=masks.causal(), implementation=SMALL))

  jax.grad(loss, (0, 1, 2))(*tokens())
  with pytest.raises(AssertionError, match="searched"):
    jax.grad(loss)(*(each.at[0, 0].set(jnp.nan) for each in tokens()))
