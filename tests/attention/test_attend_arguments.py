"""Arguments of `attend`: errors that name them, dropout, tracing."""

import dataclasses
import functools
from collections.abc import Callable

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import attention
from attention import (
  biases,
  cache,
  dot_product_attention,
  masks,
  merge,
  normalizers,
  positions,
  ring_attention,
  scores,
  split_heads,
)
from attention.implementations.blockwise import Blockwise
from attention.modules import MultiHeadAttention
from tests.attention.comparison import close, jitted
from tests.attention.oracle import CASES, IMPLEMENTATIONS, draw
from tests.matrix import sampled, sampled_product

attend = jitted(attention.attend)
attention_weights = jitted(attention.attention_weights)


def tokens(*shape, dtype=jnp.float32):
  return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
  ("name", "query", "key", "value"),
  [
    ("query", tokens(4), tokens(5, 4), tokens(5, 2)),
    ("key", tokens(3, 4), tokens(5, 3), tokens(5, 2)),
    ("key", tokens(2, 3, 4), tokens(3, 5, 4), tokens(5, 2)),
    ("value", tokens(3, 4), tokens(5, 4), tokens(6, 2)),
    ("value", tokens(2, 3, 4), tokens(2, 5, 4), tokens(3, 5, 2)),
  ],
)
def test_wrong_shape_names_the_argument(name, query, key, value):
  with pytest.raises(AssertionError, match=rf"\b{name}\b"):
    attend(query, key, value)


@pytest.mark.parametrize("value", [None, [[1.0, 2.0]] * 5])
def test_tokens_must_be_arrays(value):
  with pytest.raises(TypeError, match="value must be an array"):
    attend(tokens(3, 4), tokens(5, 4), value)


def test_tokens_of_integers_and_of_8_bits_are_refused():
  for dtype in (jnp.int32, jnp.float8_e4m3fn):
    with pytest.raises(AssertionError, match=f"^query .* got {dtype.__name__}"):
      attend(tokens(3, 4).astype(dtype), tokens(5, 4), tokens(5, 2))


@pytest.mark.parametrize(
  "dtype",
  [
    "<U1",
    pytest.param(
      "longdouble",
      marks=pytest.mark.skipif(
        np.dtype("longdouble").itemsize == 8, reason="it has 64 bits here"
      ),
    ),
  ],
)
def test_numpy_arrays_that_jax_lacks_are_refused(dtype):
  query = np.ones((3, 4), dtype)
  with pytest.raises(AssertionError, match=f"^query .* got {query.dtype}"):
    attention.attend(query, tokens(5, 4), tokens(5, 2))


def test_functions_of_positions_take_all_of_their_arguments():
  with pytest.raises(ValueError, match=r"\(query, key, query_positions, key_"):
    scores.positional(lambda query, key: query @ key.mT)
  with pytest.raises(ValueError, match="with_indices=True adds batch and head"):
    scores.modified(scores.dot(), lambda s, b, h, i, j: s)
  with pytest.raises(ValueError, match=r"modify takes \(scores, batch, head, "):
    scores.modified(scores.dot(), lambda s, i, j: s, with_indices=True)


def adding_an_axis(query, key):
  return jnp.einsum("...td,hde,...se->...hts", query, jnp.ones((6, 4, 4)), key)


@pytest.mark.parametrize(
  ("error", "message", "arguments"),
  [
    (TypeError, "mask.*bias", {"mask": jnp.zeros((3, 5))}),
    (TypeError, "mask", {"mask": "causal"}),
    (TypeError, "mask", {"mask": biases.alibi(2)}),
    (TypeError, r"call it .* masks\.causal\(\)", {"mask": masks.causal}),
    (TypeError, r"call it .* biases\.alibi\(8\)", {"bias": biases.alibi}),
    (ValueError, "mask", {"mask": jnp.ones((3, 4), bool)}),
    (ValueError, "mask", {"mask": jnp.ones((2, 3, 5), bool)}),
    (ValueError, "leading", {"mask": masks.padding(jnp.array([1, 2]))}),
    (ValueError, "key_ids", {"mask": masks.segments(*[jnp.arange(3)] * 2)}),
    (TypeError, "bias.*mask", {"bias": jnp.ones((3, 5), bool)}),
    (ValueError, "bias", {"bias": jnp.ones((4, 5))}),
    (ValueError, "bias", {"bias": biases.alibi(2)}),
    (ValueError, "score", {"score": "dot"}),
    (ValueError, "score", {"score": lambda query, key: query}),
    (ValueError, "dropout_rate", {"dropout_rate": 1.5}),
    (ValueError, "rng", {"dropout_rate": 0.5}),
    (TypeError, "rng must be", {"dropout_rate": 0.5, "rng": 0}),
    (
      TypeError,
      r"one random key, got shape \(2,\)",
      {"dropout_rate": 0.5, "rng": jax.random.split(jax.random.key(0))},
    ),
    (
      TypeError,
      r"^rng must be .* float32 and shape \(2,\)",
      {"dropout_rate": 0.5, "rng": jnp.ones(2)},
    ),
    (ValueError, "real numbers", {"score": lambda query, key: None}),
    (
      ValueError,
      "real numbers",
      {"score": lambda query, key: 1j * (query @ key.mT)},
    ),
    (
      ValueError,
      r"not add leading axes .* returned \(1, 6, 3, 5\)",
      {"score": adding_an_axis},
    ),
    (
      TypeError,
      "weight of General must be an array",
      {"score": scores.general([[1.0]])},
    ),
    (
      ValueError,
      "cap must be above 0, got 0.0",
      {"score": scores.soft_cap(scores.dot(), 0.0)},
    ),
    (
      ValueError,
      "temperature must be above 0, got -1",
      {"score": scores.temperature(scores.dot(), -1)},
    ),
  ],
)
def test_invalid_arguments_raise(error, message, arguments):
  with pytest.raises(error, match=message):
    attend(tokens(3, 4), tokens(5, 4), tokens(5, 2), **arguments)


@sampled_product(
  ("name", "implementation"),
  (["scaled_dot", "additive", "closure"], IMPLEMENTATIONS),
  default=zip(["scaled_dot", "additive", "closure"], IMPLEMENTATIONS),
)
def test_jit_traces_once(name, implementation):
  chex.clear_trace_counter()
  case = CASES[name]
  parameters = {name: jnp.ones(shape) for name, shape in case.shapes(4).items()}

  @jax.jit
  @chex.assert_max_traces(n=1)
  def run(query, key, mask, parameters):
    return attend(
      query,
      key,
      key,
      score=case.bound(parameters),
      mask=mask,
      implementation=implementation,
    )

  for seed in range(3):
    query, key = draw(seed, (3, 4), (5, 4))
    mask = masks.causal(1) & masks.padding(jnp.asarray(seed + 1))
    run(query, key, mask, parameters)


@sampled("implementation", IMPLEMENTATIONS, default=["blockwise"])
def test_scores_and_masks_are_arguments_of_jit_and_vmap(implementation):
  query, key, value = draw(0, (2, 3, 4), (2, 5, 4), (2, 5, 2))
  lengths = jnp.array([2, 5])

  def run(query, key, value, score, mask):
    return attend(
      query, key, value, score=score, mask=mask, implementation=implementation
    )

  whole = run(query, key, value, scores.cosine(3.0), masks.padding(lengths))
  mapped = jax.jit(
    jax.vmap(
      lambda query, key, value, length, score: run(
        query, key, value, score, masks.padding(length)
      ),
      in_axes=(0, 0, 0, 0, None),
    )
  )
  close(
    mapped(query, key, value, lengths, scores.cosine(3.0)),
    whole,
    rtol=1e-5,
    atol=1e-6,
  )


@sampled("implementation", IMPLEMENTATIONS, default=IMPLEMENTATIONS[2:])
def test_dropout_scales_kept_weights_and_keeps_the_lse(implementation):
  query, key = draw(1, (4, 8), (4096, 8))
  value = jnp.ones((4096, 1))
  arguments = {"implementation": implementation, "return_lse": True}
  _, lse = attend(0.1 * query, key, value, **arguments)
  dropped, dropped_lse = attend(
    0.1 * query,
    key,
    value,
    dropout_rate=0.25,
    rng=jax.random.key(0),
    **arguments,
  )
  np.testing.assert_array_equal(lse, dropped_lse)
  np.testing.assert_allclose(dropped, 1.0, atol=0.05)
  assert (abs(dropped - 1.0) > 1e-5).any()
  everything, _ = attend(
    query, key, value, dropout_rate=1.0, rng=jax.random.key(0), **arguments
  )
  assert not everything.any()


@sampled("implementation", IMPLEMENTATIONS, default=["blockwise"])
def test_dropped_weights_depend_on_the_random_key(implementation):
  query, key = draw(2, (3, 4), (5, 4))

  @jax.jit
  def weights(seed):
    return attend(
      query,
      key,
      jnp.eye(5),
      dropout_rate=0.5,
      rng=jax.random.key(seed),
      implementation=implementation,
    )

  kept = np.asarray(weights(0)) > 0
  np.testing.assert_allclose(
    np.asarray(weights(0))[kept],
    2.0 * np.asarray(attention_weights(query, key))[kept],
    rtol=1e-5,
  )
  np.testing.assert_array_equal(weights(0), weights(0))
  assert np.any(np.asarray(weights(0)) != np.asarray(weights(1)))


@sampled(
  "kind", ["threefry2x32", "rbg", "unsafe_rbg"], default=["threefry2x32"]
)
def test_random_keys_of_every_generator_drop_different_weights(kind):
  even = np.zeros((64, 4), np.float32)

  def kept(rng):
    return attend(even, even, jnp.eye(64), dropout_rate=0.5, rng=rng) > 0

  @jax.jit
  def of_step(step):
    return kept(jax.random.fold_in(jax.random.key(0, impl=kind), step))

  of_seed = jax.jit(lambda seed: kept(jax.random.key(seed, impl=kind)))
  masks = [np.asarray(of_step(step)) for step in range(4)]
  masks += [np.asarray(of_seed(seed)) for seed in range(1, 4)]
  for one, first in enumerate(masks):
    assert 0.4 < first.mean() < 0.6
    for second in masks[:one]:
      assert 0.4 < (first == second).mean() < 0.6


def test_dropout_rate_may_be_any_known_number():
  query, rng = tokens(3, 4), jax.random.key(0)
  want = attend(query, query, query, dropout_rate=0.5, rng=rng)
  for rate in (np.float32(0.5), jnp.asarray(0.5)):
    got = attend(query, query, query, dropout_rate=rate, rng=rng)
    np.testing.assert_array_equal(got, want)
  with pytest.raises(TypeError, match="dropout_rate must be a number that is"):
    jax.jit(
      lambda rate: attend(query, query, query, dropout_rate=rate, rng=rng)
    )(0.5)


def test_module_created_in_a_score_raises_with_a_hint():
  class Careless(nn.Module):
    @nn.compact
    def __call__(self, x):
      dense = nn.Dense(4)
      return attention.attend(
        x, x, x, score=lambda q, k: dense(q) @ dense(k).mT
      )

  with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
    Careless().init(jax.random.key(0), tokens(3, 4))
  assert "must be pure" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("sizes", ["b, 3, 8", "2, t, 8"])
@pytest.mark.parametrize(
  "mask", [None, masks.causal(), masks.sliding_window(2, 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_with_symbolic_sizes(mask, sizes, dtype):
  def run(query, implementation=None):
    return attend(query, query, query, mask=mask, implementation=implementation)

  symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), dtype)
  exported = export.export(jax.jit(run))(symbolic)
  (query,) = draw(0, (2, 3, 8))
  query = jnp.asarray(query, dtype)
  close(exported.call(query), run(query), rtol=4 * jnp.finfo(dtype).eps)
  with pytest.raises(NotImplementedError, match="implementation='reference'"):
    export.export(jax.jit(functools.partial(run, implementation="blockwise")))(
      symbolic
    )


def test_equal_masks_biases_and_scores_compile_once():
  choices = [
    lambda: {"mask": masks.causal() & ~masks.padding(3)},
    lambda: {"bias": biases.alibi(2)},
    lambda: {"score": scores.cosine(3.0)},
  ]
  traces = []

  @functools.partial(jax.jit, static_argnames=("mask", "bias", "score"))
  def run(query, **choice):
    traces.append(1)
    return attend(query, query, query, **choice)

  for choice in choices:
    for _ in range(2):
      run(tokens(2, 3, 4), **choice())
  assert len(traces) == len(choices)
  assert masks.causal() != masks.causal(1)
  assert masks.causal() != biases.alibi(2)
  own = masks.padding(jnp.array([1]))
  assert own != masks.padding(jnp.array([1]))
  assert len({own, masks.causal(), masks.causal()}) == 2


def test_score_parameters_for_another_number_of_heads_raise():
  heads, four = tokens(3, 5, 4), jnp.ones(4)
  for name, arguments in (
    ("weight", {"score": scores.general(jnp.ones((4, 4, 4)))}),
    ("temperature", {"score": scores.temperature(scores.dot(), four)}),
    ("cap", {"score": scores.soft_cap(scores.dot(), four)}),
    ("scale", {"score": scores.scaled_dot(four)}),
    ("sink", {"normalizer": normalizers.softmax(four)}),
    ("sink", {"normalizer": normalizers.softmax(jnp.ones((2, 3)))}),
    ("bias", {"normalizer": normalizers.sigmoid(four)}),
  ):
    message = rf"{name} has leading axes .* to \(3,\), those of the scores"
    with pytest.raises(AssertionError, match=message):
      attend(heads, heads, heads, **arguments)


@pytest.mark.parametrize(
  ("message", "score"),
  [
    ("log_gates has 5", scores.forgetting(scores.dot(), jnp.ones(5))),
    (
      "relative_keys has 3",
      scores.disentangled(jnp.ones((3, 4)), jnp.ones((3, 4))),
    ),
    (
      "relative_queries has shape",
      scores.disentangled(jnp.ones((4, 4)), jnp.ones((6, 4))),
    ),
    ("local-p needs both", scores.local(scores.dot(), 2.0, None, jnp.ones(4))),
  ],
)
def test_score_parameters_of_other_sizes_raise(message, score):
  with pytest.raises(AssertionError, match=message):
    attend(tokens(5, 4), tokens(7, 4), tokens(7, 4), score=score)


def test_scores_without_the_leading_axes_raise():
  with pytest.raises(ValueError, match=r"score must return .* it returned"):
    attend(
      tokens(2, 3, 4),
      tokens(2, 5, 4),
      tokens(2, 5, 2),
      score=lambda query, key: jnp.zeros((3, 5)),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Nearness(scores.Score):
  """A score that adds numbers of tokens, not of pairs."""

  add: Callable = dataclasses.field(metadata={"static": True})

  def pair_at(self, query, key, positions):
    return query @ key.mT + self.add(positions)


@pytest.mark.parametrize(
  ("add", "problem"),
  [
    (
      lambda at: (at.query - at.key)[None],
      r"raises TypeError: .* \(6,\), \(5,\)\. ",
    ),
    (lambda at: jnp.zeros((at.num_keys, at.num_keys)), "raises TypeError"),
  ],
)
def test_scores_of_positions_must_have_a_number_for_each_pair(add, problem):
  score = scores.soft_cap(Nearness(add), 3.0)
  message = f"pair_at of the score Nearness .* 6 queries and 5 keys .*{problem}"
  with pytest.raises(ValueError, match=message):
    attend(*[tokens(5, 4)] * 3, score=score)


def scored(score):
  return attend(*(jnp.ones((2, 3)),) * 3, score=score)


# The call, and what its error says.
WRONG_TYPES = {
  "offset must be an integer, got 1.5": lambda: masks.causal(1.5),
  "key_lengths must be an integer, got None": lambda: masks.padding(None),
  "key_lengths must hold integers, got bool; .* itself a mask": lambda: (
    masks.padding(jnp.ones((2, 3), bool))
  ),
  "query_ids must hold integers, got float32": lambda: masks.segments(
    jnp.ones(3), jnp.ones(3)
  ),
  "dropout_rate must be a number .* got '0.5'": lambda: attend(
    *(jnp.ones((2, 3)),) * 3, dropout_rate="0.5", rng=jax.random.key(0)
  ),
  "rows must be positions": lambda: masks.causal().at(jnp.zeros(3)),
  "rows and columns must have the same": lambda: masks.causal().at(
    jnp.zeros((2, 3), int), jnp.zeros(4, int)
  ),
  "num_heads must be an integer, got '2'": lambda: biases.alibi("2"),
  "factor must be an array, got None": lambda: biases.alibi(2) * None,
  "divisor must be an array": lambda: biases.alibi(2) / [1.0, 2.0],
  "max_distance must be an integer": lambda: biases.relative_position(
    jnp.ones((32, 2)), max_distance=20.5
  ),
  "key_block must be an integer": lambda: Blockwise(key_block=2.0),
  "alpha must be a number": lambda: normalizers.entmax("a"),
  "epsilon must be a number": lambda: normalizers.softpick(epsilon=None),
  "scale of ScaledDot must be an array": lambda: scored(
    scores.scaled_dot([1.0])
  ),
  "cap of SoftCap must be an array": lambda: scored(
    scores.soft_cap(scores.dot(), None)
  ),
  "score must be a Score": lambda: scored(scores.qk_norm(None)),
  "log_gates must be an array": lambda: scores.forgetting(scores.dot(), None),
  "positions": lambda: scores.forgetting(scores.dot(), 1.0),
  "weight has no positions": lambda: scored(scores.location(jnp.ones((0, 3)))),
  "window must be at least 0": lambda: scored(scores.local(scores.dot(), -1)),
  "score must be a Score, got 'dot'": lambda: scored(scores.local("dot", 1)),
  "epsilon must be a number, got 'small'": lambda: scored(
    scores.qk_norm(scores.dot(), epsilon="small")
  ),
  "leading_shape must be a tuple": lambda: cache.init(2, 4, 3),
  "leading_shape must be a tuple of sizes, got 3": lambda: MultiHeadAttention(
    2
  ).apply(
    MultiHeadAttention(2).init(jax.random.key(0), jnp.ones((3, 4))),
    *(3, 5),
    method="init_cache",
  ),
  "cache must be a Cache": lambda: MultiHeadAttention(2).init(
    jax.random.key(0), jnp.ones((3, 4)), None, method="decode"
  ),
  "cache must be a Cache, from .* init_cache, got 'none'": lambda: cache.append(
    "none", *(jnp.ones((2, 3)),) * 2
  ),
  "mesh_axes must be MeshAxes": lambda: MultiHeadAttention(
    2, mesh_axes="tensor"
  ).init(jax.random.key(0), jnp.ones((3, 4))),
  "normalizer takes .scores., got a function of .a, b.": lambda: attend(
    *(jnp.ones((2, 3)),) * 3, normalizer=lambda a, b: a
  ),
  "base must be above 0": lambda: positions.rotary(jnp.ones((2, 4)), base=-1.0),
  "original_length must be above 0": lambda: positions.YaRNScaling(2.0, 0),
  "features must be at least 0": lambda: positions.sinusoidal(3, -2),
  "key_size must be at least 1": lambda: cache.init((2,), 4, -3),
  "features must be an integer": lambda: positions.sinusoidal(3, 4.0),
  "factor must be a number": lambda: positions.LinearScaling("2"),
  "length must be at least 0": lambda: positions.sinusoidal(-3, 4),
  "options must be RotaryOptions": lambda: positions.rotary(
    jnp.ones((2, 4)), options="half_split"
  ),
  "scaling must be": lambda: positions.RotaryOptions(scaling="yarn"),
  "query_seq_lengths must be integers": lambda: dot_product_attention(
    *(jnp.ones((1, 2, 2, 4)),) * 3, query_seq_lengths=jnp.array([1.5])
  ),
  "local_window_size must be": lambda: dot_product_attention(
    *(jnp.ones((1, 2, 2, 4)),) * 3, local_window_size=1.5
  ),
  "contexts.1. has shape": lambda: merge(
    [jnp.ones((2, 1)), jnp.ones((2, 3))], [jnp.ones(2)] * 2
  ),
  r"contexts.1. has leading axes \(3,\)": lambda: merge(
    [jnp.ones((2, 1, 1)), jnp.ones((3, 1, 1))],
    [jnp.ones((2, 1)), jnp.ones((3, 1))],
  ),
  r"key has leading axes \(3,\)": lambda: scores.dot_score(
    jnp.ones((2, 1, 4)), jnp.ones((3, 1, 4))
  ),
  "num_heads must be an integer, got 2.0": lambda: split_heads(
    jnp.ones((2, 4)), 2.0
  ),
  "lengths must be integers, got float32": lambda: jax.eval_shape(
    cache.append,
    cache.init((2,), 4, 3, length_shape=(2,)),
    *(jnp.ones((2, 1, 3)),) * 2,
    jnp.ones(2),
  ),
  "init_cache needs parameters": lambda: MultiHeadAttention(2).init_cache(
    (2,), 4
  ),
  "left . right must be at least 0": lambda: masks.sliding_window(-3, 0),
  "inside jax.shard_map": lambda: ring_attention(
    *(jnp.ones((2, 3)),) * 3, axis_name="sequence"
  ),
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_wrong_types_and_sizes_name_the_argument(message):
  with pytest.raises((AssertionError, TypeError, ValueError), match=message):
    WRONG_TYPES[message]()


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_positions_of_another_length_raise(name):
  lengths = {"rows": jnp.arange(5), "columns": jnp.arange(7)}
  lengths[name] = jnp.arange(3)
  tokens = jnp.ones((5, 4)), jnp.ones((7, 4)), jnp.ones((7, 4))
  with pytest.raises(ValueError, match=name):
    attend(*tokens, mask=masks.causal().at(**lengths))


def test_a_parameter_may_be_absent_where_its_type_says_so():
  query, key = tokens(5, 4), tokens(7, 4)
  score = scores.disentangled(jnp.ones((4, 4)), None)
  assert attend(query, key, key, score=score).shape == (5, 4)
