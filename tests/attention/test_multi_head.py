"""Multi-head attention as a pure function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import biases, masks, merge_heads, scores, split_heads
from attention.modules import MultiHeadAttention
from tests.attention.comparison import close, jitted
from tests.attention.oracle import draw
from tests.matrix import sampled

attend = jitted(attention.attend)
multi_head_attention = jitted(attention.multi_head_attention)
NAMES = ("query_weight", "key_weight", "value_weight", "output_weight")


def inputs(num_heads=4, num_key_value_heads=2):
  query, key, *weights = draw(
    0,
    (2, 5, 6),
    (2, 7, 3),
    (6, num_heads, 3),
    (3, num_key_value_heads, 3),
    (3, num_key_value_heads, 2),
    (num_heads, 2, 8),
  )
  return query, key, dict(zip(NAMES, weights, strict=True))


def loop(query, key, weights, score=None, mask=None, bias=None):
  """One head after another; the mask and the bias are arrays."""
  num_heads = weights["query_weight"].shape[1]
  group = num_heads // weights["key_weight"].shape[1]
  total = 0.0
  for head in range(num_heads):
    context = attend(
      query @ weights["query_weight"][:, head],
      key @ weights["key_weight"][:, head // group],
      key @ weights["value_weight"][:, head // group],
      score=scores.scaled_dot() if score is None else score(head),
      mask=mask,
      bias=None if bias is None else bias[head],
    )
    total = total + context @ weights["output_weight"][head]
  return total


def test_splitting_and_merging_are_inverse():
  (tokens,) = draw(1, (2, 5, 12))
  heads = split_heads(tokens, 3)
  assert heads.shape == (2, 3, 5, 4)
  np.testing.assert_array_equal(heads[:, 1], tokens[..., 4:8].astype("f4"))
  np.testing.assert_array_equal(merge_heads(heads), tokens.astype("f4"))
  assert merge_heads(heads[:0]).shape == (0, 5, 12)
  with pytest.raises(ValueError, match="num_heads=5"):
    split_heads(tokens, 5)
  with pytest.raises(AssertionError, match="x"):
    merge_heads(jnp.ones((2, 3)))


@sampled("num_key_value_heads", [1, 2, 4], default=[2])
def test_equals_one_head_after_another(num_key_value_heads):
  query, key, weights = inputs(4, num_key_value_heads)
  lengths = jnp.array([3, 7])
  mask = masks.causal(2) & masks.padding(lengths)
  got = multi_head_attention(
    query, key, key, **weights, mask=mask, bias=biases.alibi(4)
  )
  expected = loop(
    query,
    key,
    weights,
    mask=mask.materialize(5, 7),
    bias=biases.alibi(4).materialize(5, 7),
  )
  close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_arrays_and_parameters_of_heads_line_up(num_key_value_heads):
  query, key, weights = inputs(4, num_key_value_heads)
  sharpness = jnp.array([1.0, 2.0, 4.0, 8.0])
  (numbers,) = draw(2, (4, 5, 7))
  allowed = np.random.default_rng(3).random((4, 5, 7)) < 0.7
  got = multi_head_attention(
    query,
    key,
    key,
    **weights,
    score=scores.cosine(sharpness),
    mask=jnp.asarray(allowed)[None],
    bias=jnp.asarray(numbers, jnp.float32),
  )
  expected = loop(
    query,
    key,
    weights,
    score=lambda head: scores.cosine(sharpness[head]),
    bias=jnp.where(allowed, numbers, -jnp.inf),
  )
  close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_plain_function_receives_heads_as_one_axis():
  query, key, weights = inputs(4, 2)
  factor = jnp.array([1.0, 2.0, 3.0, 4.0])

  def score(query, key):
    products = jnp.einsum("...htd,...hsd->...hts", query, key)
    return factor.reshape(1, 4, 1, 1) * products

  got = multi_head_attention(query, key, key, **weights, score=score)
  expected = loop(
    query, key, weights, score=lambda head: scores.scaled_dot(factor[head])
  )
  close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)])
def test_grouped_heads_of_no_examples_and_no_tokens(shape):
  module = MultiHeadAttention(4, num_key_value_heads=2)
  initialize = functools.partial(module.init_with_output, jax.random.key(0))
  outputs, _ = jax.eval_shape(initialize, jnp.ones(shape))
  assert outputs.shape == shape


def test_grouped_heads_are_not_repeated_in_memory():
  key = jax.ShapeDtypeStruct((2, 1, 64, 16), jnp.float32)
  query = jax.ShapeDtypeStruct((2, 8, 3, 16), jnp.float32)
  from attention.multi_head.grouped_query import attend_heads

  text = str(
    jax.make_jaxpr(
      lambda query, key: attend_heads(
        query, key, key, score=scores.scaled_dot(), mask=None, bias=None
      )
    )(query, key)
  )
  assert "f32[2,8,64,16]" not in text
  assert "f32[2,1,8,64,16]" not in text


def test_biases_of_the_projections():
  query, key, weights = inputs()
  shapes = {
    "query_bias": (4, 3),
    "key_bias": (2, 3),
    "value_bias": (2, 2),
    "output_bias": (8,),
  }
  added = dict(zip(shapes, draw(4, *shapes.values()), strict=True))

  def extended(name):
    """The bias as one more row of the weight, for inputs with a 1."""
    return np.concatenate(
      [weights[f"{name}_weight"], added[f"{name}_bias"][None]]
    )

  ones = {n: extended(n) for n in ("query", "key", "value")}
  with_one = [
    np.concatenate([x, np.ones((*x.shape[:-1], 1))], -1) for x in (query, key)
  ]
  expected = multi_head_attention(
    with_one[0],
    with_one[1],
    with_one[1],
    ones["query"],
    ones["key"],
    ones["value"],
    weights["output_weight"],
  )
  got = multi_head_attention(query, key, key, **weights, **added)
  close(
    got, expected + added["output_bias"].reshape(1, 1, 8), rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize(
  ("argument", "shape"),
  [
    ("query_weight", (5, 4, 3)),
    ("key_weight", (4, 2, 3)),
    ("value_weight", (3, 1, 2)),
    ("output_weight", (3, 2, 8)),
    ("output_weight", (4, 3, 8)),
    ("query_bias", (4, 2)),
    ("query_bias", (3, 3)),
    ("key_bias", (3,)),
    ("value_bias", (1, 2)),
    ("output_bias", (7,)),
    ("output_bias", (5, 1)),
  ],
)
def test_errors_name_the_weight_or_bias(argument, shape):
  query, key, weights = inputs()
  given = weights | {argument: jnp.ones(shape)}
  with pytest.raises(AssertionError, match=argument):
    multi_head_attention(query, key, key, **given)


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_errors_name_the_weight_of_the_score(num_key_value_heads):
  query, key, weights = inputs(4, num_key_value_heads)
  score = scores.additive(
    jnp.ones((4, 3, 5)), jnp.ones((4, 2, 5)), jnp.ones((4, 5))
  )
  with pytest.raises(AssertionError, match="key_weight"):
    multi_head_attention(query, key, key, **weights, score=score)
  with pytest.raises(AssertionError, match="weight has shape"):
    multi_head_attention(
      query, key, key, **weights, score=scores.general(jnp.ones((2, 3)))
    )


def test_the_score_itself_checks_grouped_heads():
  class Checked(scores.Score):
    def check(self, query, key):
      raise AssertionError(f"{query.shape}, {key.shape} are the shapes")

  query, key, weights = inputs(4, 2)
  with pytest.raises(AssertionError, match="are the shapes"):
    attention.multi_head_attention(query, key, key, **weights, score=Checked())


def test_key_value_heads_must_divide_heads():
  query, key, weights = inputs(4, 3)
  with pytest.raises(ValueError, match="multiple"):
    multi_head_attention(query, key, key, **weights)


def test_lengths_need_a_cache():
  query, key, weights = inputs(4, 2)
  with pytest.raises(ValueError, match="there is no cache"):
    multi_head_attention(query, key, key, **weights, lengths=jnp.ones(2, int))
