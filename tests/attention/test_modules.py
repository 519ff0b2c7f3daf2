"""The Flax modules equal the pure functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import biases, masks, multi_head_attention, scores
from attention.implementations.blockwise import Blockwise
from attention.modules import (
  POSITIONAL_SCORE_NAMES,
  SCORE_NAMES,
  SCORE_WRAPPER_NAMES,
  Attention,
  LearnedScore,
  MultiHeadAttention,
)
from tests.attention.comparison import close, jitted
from tests.attention.oracle import draw, single
from tests.attention.test_multi_head_cache import pure_arguments
from tests.matrix import sampled

attend = jitted(attention.attend)


@sampled("name", SCORE_NAMES + POSITIONAL_SCORE_NAMES, default=["additive"])
def test_attention_equals_attend_with_its_bound_score(name):
  query, key, value = single(0, (2, 3, 4), (2, 5, 4), (2, 5, 6))
  module = Attention(name, hidden_size=8)
  mask = masks.padding(jnp.array([2, 5]))
  context, variables = jax.jit(module.init_with_output)(
    jax.random.key(0), query, key, value, mask=mask
  )
  score = module.apply(variables, 4, 4, method=module.bound_score)
  close(
    context,
    attend(query, key, value, score=score, mask=mask),
    rtol=1e-5,
    atol=1e-6,
  )
  run = functools.partial(module.apply, method=module.weights)
  weights = jax.jit(run)(variables, query, key, mask=mask)
  close(
    jnp.einsum("bts,bse->bte", weights, value), context, rtol=1e-5, atol=1e-6
  )
  own = jax.jit(module.apply)(variables, query, key)
  close(own, attend(query, key, key, score=score), rtol=1e-5, atol=1e-6)


def test_parameters_of_the_named_scores():
  def shapes_of(module):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), 4, 6))

  expected = {
    "dot": {},
    "scaled_dot": {},
    "general": {"weight": (4, 6)},
    "additive": {
      "query_weight": (4, 8),
      "key_weight": (6, 8),
      "score_weight": (8,),
      "bias": (8,),
    },
    "concat": {"weight": (10, 8), "score_weight": (8,)},
    "cosine": {"log_sharpness": ()},
  }
  for name, shapes in expected.items():
    single_head = LearnedScore(name, hidden_size=8)
    variables = shapes_of(single_head)
    parameters = variables.get("params", {})
    assert {n: p.shape for n, p in parameters.items()} == shapes
    by_head = LearnedScore(name, hidden_size=8, num_heads=3)
    variables = shapes_of(by_head)
    parameters = variables.get("params", {})
    assert {n: p.shape for n, p in parameters.items()} == {
      n: (3, *shape) for n, shape in shapes.items()
    }


@pytest.mark.exhaustive
def test_initial_scores_are_neither_tiny_nor_huge():
  (query,), (key,) = single(0, (64, 32)), single(1, (64, 32))
  for name in ("general", "additive", "concat"):
    module = LearnedScore(name, hidden_size=64, num_heads=4)
    numbers = jax.jit(
      lambda module=module: module.init_with_output(jax.random.key(0), 32, 32)[
        0
      ](query, key)
    )()
    assert numbers.shape == (4, 64, 64)
    assert 0.1 < float(jnp.std(numbers)) < 10.0
  score, _ = LearnedScore("cosine").init_with_output(jax.random.key(0), 3, 3)
  close(score.sharpness, 10.0, rtol=1e-5, atol=1e-6)


def test_bound_score_or_callable_is_used_unchanged():
  query, key = single(0, (2, 3, 4), (2, 5, 4))
  for score in (scores.cosine(3.0), lambda query, key: query @ key.mT):
    context, variables = jax.jit(Attention(score).init_with_output)(
      jax.random.key(0), query, key
    )
    assert not variables
    close(context, attend(query, key, key, score=score), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "make", [Attention, lambda s: MultiHeadAttention(2, score=s)]
)
def test_an_unknown_score_name_raises(make):
  with pytest.raises(ValueError, match=r"additive, concat, cosine.*'nought'"):
    make("nought").init(jax.random.key(0), *single(0, (2, 3, 4), (2, 5, 4)))


@sampled("num_key_value_heads", [None, 2, 1], default=[2])
def test_multi_head_equals_the_pure_function(num_key_value_heads):
  query, key, value = single(0, (2, 5, 8), (2, 7, 6), (2, 7, 3))
  module = MultiHeadAttention(
    4,
    num_key_value_heads=num_key_value_heads,
    features=12,
    bias_init=jax.nn.initializers.normal(1.0),
  )
  arguments = {"mask": masks.causal(1), "bias": biases.alibi(4)}
  outputs, variables = jax.jit(module.init_with_output)(
    jax.random.key(0), query, key, value, **arguments
  )
  weights, added = pure_arguments(variables)
  assert outputs.shape == (2, 5, 12)
  pure = jax.jit(multi_head_attention)
  want = pure(query, key, value, *weights, **added, **arguments)
  close(outputs, want, rtol=1e-5, atol=1e-5)


@sampled(
  ("name", "rotary", "num_key_value_heads"),
  [
    ("dot", False, 4),
    ("scaled_dot", True, 4),
    ("scaled_dot", True, 1),
    ("general", False, 4),
    ("additive", True, 2),
    ("concat", False, 2),
    ("cosine", False, 2),
  ],
  default=[("additive", True, 2)],
)
def test_cached_decoding_equals_recomputation(
  name, rotary, num_key_value_heads
):
  (tokens,) = single(0, (2, 7, 8))
  module = MultiHeadAttention(
    4, num_key_value_heads=num_key_value_heads, score=name, rotary=rotary
  )
  # The cache is longer than the sequence; the bias has the cache's length.
  (numbers,) = single(3, (4, 9, 9))
  window = masks.sliding_window(4, None)
  expected, variables = jax.jit(module.init_with_output)(
    jax.random.key(0),
    tokens,
    mask=masks.causal() & window,
    bias=biases.alibi(4) + numbers[:, :7, :7],
  )

  @jax.jit
  def decode(variables, tokens, cache):
    return module.apply(
      variables,
      tokens,
      cache,
      mask=window,
      bias=biases.alibi(4) + numbers,
      method=module.decode,
    )

  cache = module.apply(variables, (2,), 9, method=module.init_cache)
  outputs = []
  for start, stop in ((0, 3), (3, 4), (4, 7)):
    output, cache = decode(variables, tokens[:, start:stop], cache)
    outputs.append(output)
  close(jnp.concatenate(outputs, axis=1), expected, rtol=1e-4, atol=1e-5)
  assert int(cache.length) == 7


@sampled(
  ("name", "num_key_value_heads"),
  [
    ("scaled_dot", 4),
    ("additive", 4),
    ("general", 2),
    ("additive", 2),
    ("local_m", 4),
  ],
  default=[("local_m", 4)],
)
def test_projected_memory_can_be_reused(name, num_key_value_heads):
  query, memory = single(0, (2, 3, 8), (2, 7, 8))
  module = MultiHeadAttention(
    4, num_key_value_heads=num_key_value_heads, score=name, rotary=True
  )
  mask = masks.padding(jnp.array([3, 7]))
  expected, variables = jax.jit(module.init_with_output)(
    jax.random.key(0), query, memory, mask=mask
  )

  @jax.jit
  def run(variables, query, memory):
    projected = module.apply(variables, memory, method=module.project)

    def by_steps(method, axis):
      results = [
        module.apply(
          variables,
          query[:, step : step + 1],
          projected,
          mask=mask,
          query_offset=step,
          method=method,
        )
        for step in range(3)
      ]
      return jnp.concatenate(results, axis)

    return (
      by_steps(module.attend_projected, axis=1),
      by_steps(module.weights_projected, axis=2),
      module.apply(variables, query, memory, mask=mask, method=module.weights),
    )

  outputs, weights, directly = run(variables, query, memory)
  close(outputs, expected, rtol=1e-4, atol=1e-5)
  assert weights.shape == (2, 4, 3, 7)
  close(weights, directly, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
  assert not weights[0, ..., 3:].any()


@sampled(
  "make",
  [Attention, lambda **k: MultiHeadAttention(2, **k)],
  default=[Attention],
)
def test_computes_in_bfloat16_with_float32_parameters(make):
  (tokens,) = single(0, (2, 5, 8))
  module = make(score="additive", dtype=jnp.bfloat16)
  output, variables = jax.jit(module.init_with_output)(
    jax.random.key(0), tokens, tokens
  )
  assert output.dtype == jnp.bfloat16
  for leaf in jax.tree.leaves(variables):
    assert leaf.dtype == jnp.float32
  wide = jax.jit(make(score="additive").apply)(variables, tokens, tokens)
  close(output.astype(jnp.float32), wide, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
  "make", [Attention, lambda **k: MultiHeadAttention(2, **k)]
)
def test_dropout_needs_an_rng_only_when_not_deterministic(make):
  (tokens,) = single(0, (2, 5, 8))
  module = make(score="scaled_dot", dropout_rate=0.5)
  plain, variables = jax.jit(module.init_with_output)(
    jax.random.key(0), tokens, tokens
  )
  apply = jax.jit(functools.partial(module.apply, deterministic=False))
  dropped = apply(
    variables, tokens, tokens, rngs={"dropout": jax.random.key(1)}
  )
  assert abs(dropped - plain).max() > 1e-3


def test_head_counts_that_do_not_divide_raise():
  with pytest.raises(ValueError, match="head_size"):
    MultiHeadAttention(3).init(jax.random.key(0), jnp.ones((5, 8)))
  with pytest.raises(ValueError, match="multiple"):
    MultiHeadAttention(4, num_key_value_heads=3).init(
      jax.random.key(0), jnp.ones((5, 8))
    )
  with pytest.raises(ValueError, match="apply"):
    MultiHeadAttention(2).init(
      jax.random.key(0), (2,), 8, method=MultiHeadAttention.init_cache
    )


@pytest.mark.parametrize(
  ("name", "module"),
  [
    ("num_heads", MultiHeadAttention(0)),
    ("head_size", MultiHeadAttention(2, head_size=0)),
    ("num_key_value_heads", MultiHeadAttention(2, num_key_value_heads=0)),
    ("features", MultiHeadAttention(2, features=0)),
    ("hidden_size", Attention("additive", hidden_size=0)),
  ],
)
def test_sizes_are_at_least_one(name, module):
  with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
    module.init(jax.random.key(0), jnp.ones((5, 8)), jnp.ones((5, 8)))


def test_weights_need_no_values():
  query, key, value = single(23, (2, 3, 8), (2, 5, 8), (2, 5, 6))
  module = MultiHeadAttention(num_heads=2)
  variables = jax.jit(module.init)(jax.random.key(0), query, key, value)
  weights = jax.eval_shape(
    functools.partial(module.apply, method="weights"), variables, query, key
  )
  assert weights.shape == (2, 2, 3, 5)


@pytest.mark.exhaustive
def test_half_precision_cache_stores_float32_projections():
  (tokens,) = draw(24, (1, 4, 8))
  tokens = 40.0 * jnp.asarray(tokens, jnp.float16)
  module = MultiHeadAttention(num_heads=2, score="additive", dtype=jnp.float16)
  variables = jax.jit(module.init)(jax.random.key(0), tokens)
  cache = module.apply(variables, (1,), 4, method="init_cache")
  assert cache.key.dtype == jnp.float32
  assert cache.value.dtype == jnp.float16
  decode = functools.partial(module.apply, method="decode")
  outputs, _ = jax.jit(decode)(variables, tokens, cache)
  want = jax.jit(module.apply)(variables, tokens, mask=masks.causal())
  close(outputs, want, rtol=0.01, atol=0.01)


@sampled("wrapper", SCORE_WRAPPER_NAMES, default=["qk_norm"])
def test_wrapped_scores_equal_the_wrappers_of_the_library(wrapper):
  query, key = single(0, (2, 3, 4), (2, 5, 4))
  module = LearnedScore("dot", num_heads=2, wrapper=wrapper, cap=2.0)
  score, variables = module.init_with_output(jax.random.key(0), 4, 4)
  if wrapper == "soft_cap":
    assert not variables
    want = scores.soft_cap(scores.dot(), 2.0)
  else:
    change = {"log_temperature": jnp.log(jnp.array([2.0, 0.5]))}
    score = module.apply({"params": change}, 4, 4)
    dot = scores.dot()
    inner = scores.qk_norm(dot) if wrapper == "qk_norm" else dot
    want = scores.temperature(inner, jnp.array([2.0, 0.5]))
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes == {"log_temperature": (2,)}
  run = jax.jit(lambda query, key: (score(query, key), want(query, key)))
  np.testing.assert_allclose(*run(query, key), rtol=1e-5)


@pytest.mark.parametrize("name", ["local_m", "local_p"])
def test_local_scores_may_use_the_dot_product(name):
  module = LearnedScore(name, window=2, local_score="dot")
  score, variables = module.init_with_output(jax.random.key(0), 4, 4)
  assert isinstance(score.score, type(scores.dot()))
  assert "weight" not in variables.get("params", {})
  with pytest.raises(ValueError, match="local_score must be 'general' or 'd"):
    LearnedScore(name, local_score="cosine").init(jax.random.key(0), 4, 4)


@pytest.mark.parametrize("option", ["foo", "hidden_size"])
def test_an_unknown_option_of_scores_is_named(option):
  module = Attention("local_m", score_options={option: 3})
  with pytest.raises(
    ValueError, match=f"no '{option}'; .* window, local_score"
  ):
    module.init(jax.random.key(0), *[jnp.ones((3, 4))] * 2)
  if option == "foo":
    module = MultiHeadAttention(2, score="shaw", score_options={option: 3})
    with pytest.raises(ValueError, match="score_options has no 'foo'"):
      module.init(jax.random.key(0), jnp.ones((3, 4)))


def test_a_score_without_a_name_has_the_options_of_wrappers():
  tokens, options = jnp.ones((3, 4)), {"wrapper": "soft_cap", "cap": 2.0}
  for score in (scores.dot(), attention.dot_score):
    modules = [
      Attention(each, score_options=options) for each in ("dot", score)
    ]
    results = [each.apply({}, tokens, tokens) for each in modules]
    np.testing.assert_array_equal(*results)
    module = Attention(score, score_options={"window": 3})
    with pytest.raises(ValueError, match="no 'window'; there are wrapper, cap"):
      module.apply({}, tokens, tokens)


def test_an_unknown_wrapper_of_scores_is_named():
  module = LearnedScore("dot", wrapper="cap")
  with pytest.raises(ValueError, match="wrapper must be None or one of soft_c"):
    module.init(jax.random.key(0), 4, 4)


def test_a_wrapper_changes_the_score_within_the_window_of_local_p():
  query, key = single(0, (2, 3, 4), (2, 5, 4))
  module = LearnedScore(
    "local_p", num_heads=2, window=2, wrapper="soft_cap", cap=0.5
  )

  @jax.jit
  def run(query, key):
    score, variables = module.init_with_output(jax.random.key(0), 4, 4)
    own = variables["params"]
    inner = scores.soft_cap(scores.general(own["weight"]), 0.5)
    want = scores.local(inner, 2, own["query_weight"], own["position_weight"])
    return score(query, key), want(query, key)

  np.testing.assert_allclose(*run(query, key), rtol=1e-5)


def test_key_lengths_are_those_of_local_p_without_padding():
  """Padded tokens change nothing, in all methods that take lengths."""
  tokens, memory = single(0, (2, 5, 8), (2, 7, 8))
  lengths = jnp.array([4, 7])
  mask = masks.padding(lengths)
  module = MultiHeadAttention(
    4,
    num_key_value_heads=2,
    score="local_p",
    score_options={"window": 2},
    implementation=Blockwise(query_block=2, key_block=3, leading_block=1),
  )
  variables = jax.jit(module.init)(jax.random.key(0), tokens, memory)

  @jax.jit
  def run(tokens, memory, **options):
    def call(method, *arguments):
      return module.apply(variables, *arguments, method=method, **options)

    projected = module.apply(variables, memory, method="project")
    contexts = (
      call("__call__", tokens, memory),
      call("attend_projected", tokens, projected),
    )
    weights = (
      call("weights", tokens, memory),
      call("weights_projected", tokens, projected),
    )
    return contexts, weights

  contexts, weights = run(tokens, memory, mask=mask, key_lengths=[4, 7])
  for row, length in enumerate(lengths):
    alone = slice(row, row + 1)
    want = run(tokens[alone], memory[alone, :length])
    got = (
      [each[alone] for each in contexts],
      [each[alone, ..., :length] for each in weights],
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      close(one, other, rtol=1e-4, atol=1e-5)


@sampled("name", POSITIONAL_SCORE_NAMES, default=["disentangled"])
def test_positional_scores_of_heads_learn_and_decode(name):
  """The cache has more positions than there are tokens."""
  tokens = single(0, (2, 6, 8))[0]
  module = MultiHeadAttention(
    4,
    num_key_value_heads=2,
    score=name,
    score_options={
      "max_distance": 3,
      "max_length": 6,
      "window": 2,
      "causal": True,
    },
  )
  variables = jax.jit(module.init)(jax.random.key(0), tokens)

  @jax.jit
  def run(variables):
    def loss(variables):
      outputs = module.apply(variables, tokens, mask=masks.causal())
      return jnp.sum(outputs**2), outputs

    gradient, outputs = jax.grad(loss, has_aux=True)(variables)
    init = functools.partial(module.apply, method=module.init_cache)
    decode = functools.partial(module.apply, method=module.decode)
    memory = init(variables, (2,), 9)
    parts = []
    for part in jnp.split(tokens, [3, 4], axis=1):
      output, memory = decode(variables, part, memory)
      parts.append(output)
    return gradient, outputs, jnp.concatenate(parts, axis=1)

  gradient, outputs, decoded = run(variables)
  close(decoded, outputs, rtol=1e-4, atol=1e-5)
  score = gradient["params"]["learned_score"]
  # A constant for each query does not change its weights.
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(score))
  assert all(leaf.any() for leaf in jax.tree.leaves(score))


@pytest.mark.parametrize("rotary", ["half_split", 500.0])
def test_rotary_is_a_choice_or_options(rotary):
  module = MultiHeadAttention(2, rotary=rotary)
  with pytest.raises(TypeError, match="rotary must be a bool"):
    module.init(jax.random.key(0), jnp.ones((3, 4)))
