"""The pure multi-head attention with rotary positions and a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import biases, cache, masks, multi_head_attention, scores
from attention.implementations.blockwise import Blockwise
from attention.modules import MultiHeadAttention
from tests.attention.comparison import close
from tests.attention.oracle import draw, single
from tests.matrix import sampled

NAMES = ("query", "key", "value", "output")


def pure_arguments(variables):
  """The weights and the biases of a module, for the pure function."""
  projections = [variables["params"][f"{name}_projection"] for name in NAMES]
  weights = [projection["kernel"] for projection in projections]
  added = {
    f"{name}_bias": projection["bias"]
    for name, projection in zip(NAMES, projections)
  }
  return weights, added


@sampled("num_key_value_heads", [4, 1], default=[1])
def test_the_cache_equals_the_module_and_recomputation(num_key_value_heads):
  (tokens,) = single(0, (2, 5, 16))
  module = MultiHeadAttention(
    4,
    num_key_value_heads=num_key_value_heads,
    rotary=True,
    bias_init=jax.nn.initializers.normal(1.0),
  )
  variables = jax.jit(module.init)(jax.random.key(1), tokens)
  window, alibi = masks.sliding_window(3, None), biases.alibi(4)
  weights, added = pure_arguments(variables)

  @jax.jit
  def attend(tokens, cache, mask):
    options = {"rotary": True, "mask": mask, "bias": alibi, "cache": cache}
    return multi_head_attention(
      tokens, tokens, tokens, *weights, **added, **options
    )

  whole = attend(tokens, None, masks.causal() & window)
  by_module = jax.jit(module.apply)(
    variables, tokens, mask=masks.causal() & window, bias=alibi
  )
  close(whole, by_module, rtol=1e-4, atol=1e-5)
  held = cache.init((2, num_key_value_heads), 8, 4)
  start, held = attend(tokens[:, :3], held, window)
  rest, held = attend(tokens[:, 3:], held, window)
  got = np.concatenate([start, rest], axis=1)
  close(got, whole, rtol=1e-4, atol=1e-5)
  assert int(held.length) == 5
  own = module.apply(variables, (2,), 8, method="init_cache")
  assert (own.key.shape, own.value.shape) == (held.key.shape, held.value.shape)
  decoded, _ = jax.jit(functools.partial(module.apply, method="decode"))(
    variables, tokens, own, mask=window, bias=alibi
  )
  close(decoded, whole, rtol=1e-4, atol=1e-5)


def assert_decodes(step, held, tokens, want, ragged):
  """Decoding 12 tokens of two examples in parts gives rows of `want`.

  The arguments of `step` are inputs, the cache and, if it is ragged, the number
  of new tokens of each example, else None.
  """
  starts = np.zeros(2, int)
  for lengths in ([3, 1], [0, 3], [2, 2], [3, 1], [1, 2], [3, 3]):
    lengths = np.array(lengths if ragged else [2, 2])
    inputs = np.zeros((2, 3 if ragged else 2, 8), np.float32)
    for row, (start, length) in enumerate(zip(starts, lengths)):
      inputs[row, :length] = tokens[row, start : start + length]
    given = jnp.asarray(lengths) if ragged else None
    outputs, held = step(inputs, held, given)
    for row, (start, length) in enumerate(zip(starts, lengths)):
      expected = want[row, start : start + length]
      close(outputs[row, :length], expected, rtol=1e-4, atol=1e-5)
    starts += lengths
  assert starts.max() == 12
  np.testing.assert_array_equal(held.length, starts if ragged else 12)


@sampled(
  ("ragged", "rolling", "implementation"),
  [
    (True, False, "reference"),
    (True, True, "reference"),
    (False, True, "reference"),
    (True, True, Blockwise(query_block=2, key_block=3)),
    (True, False, Blockwise(query_block=1, key_block=3)),
  ],
  default=[(True, False, "reference")],
)
def test_ragged_and_rolling_caches_equal_recomputation(
  ragged, rolling, implementation
):
  (tokens,) = single(0, (2, 12, 8))
  module = MultiHeadAttention(
    4, num_key_value_heads=2, rotary=True, implementation=implementation
  )
  # A mask with a parameter per example, and a bias with one per head.
  hidden = ~masks.sliding_window(jnp.array([1, 2]), -1)
  mask, bias = hidden | masks.prefix(3), biases.alibi(4)
  window = masks.sliding_window(4 if rolling else None, None)
  want, variables = jax.jit(module.init_with_output)(
    jax.random.key(1), tokens, mask=masks.causal() & window & mask, bias=bias
  )
  cache = module.apply(
    variables,
    (2,),
    5 if rolling else 12,
    method="init_cache",
    ragged=ragged,
    rolling=rolling,
  )

  @jax.jit
  def decode(inputs, cache, lengths):
    options = {"mask": mask, "bias": bias, "lengths": lengths}
    return module.apply(variables, inputs, cache, method="decode", **options)

  assert_decodes(decode, cache, tokens, want, ragged)


def _relative_scores():
  table, weight, query_weight, position_weight = single(
    7, (4, 9, 4), (12, 4), (4, 4, 5), (4, 5)
  )
  return {
    "modified": scores.modified(
      scores.dot(),
      lambda scores, batch, head, i, j: (
        scores - (0.3 + 0.2 * batch + 0.1 * head) * abs(i - j)
      ),
      with_indices=True,
    ),
    "shaw": scores.shaw(table),
    "location": scores.location(weight),
    "local_p": scores.local(
      scores.dot(), 3, query_weight, position_weight, causal=True
    ),
  }


@sampled(
  ("name", "ragged", "rolling", "implementation"),
  [
    (name, ragged, rolling, implementation)
    for name in ("modified", "shaw", "location", "local_p")
    for ragged, rolling in ((True, False), (False, True), (True, True))
    for implementation in (
      "reference",
      Blockwise(query_block=1, key_block=3),
      Blockwise(query_block=2, key_block=4, leading_block=1),
    )
  ],
  default=[
    ("modified", True, True, "reference"),
    (
      "shaw",
      True,
      True,
      Blockwise(query_block=2, key_block=4, leading_block=1),
    ),
  ],
)
def test_scores_of_positions_work_with_every_cache(
  name, ragged, rolling, implementation
):
  """A group of query heads shares keys; each example has its length."""
  (tokens,) = single(0, (2, 12, 8))
  shapes = (8, 4, 4), (8, 2, 4), (8, 2, 4), (4, 4, 8)
  weights = [np.float32(0.5 * each) for each in draw(1, *shapes)]
  options = {
    "score": _relative_scores()[name],
    "implementation": implementation,
  }
  window = masks.sliding_window(4 if rolling else None, None)
  want = jax.jit(
    lambda tokens: multi_head_attention(
      *[tokens] * 3, *weights, mask=masks.causal() & window, **options
    )
  )(tokens)
  held = cache.init(
    (2, 2),
    5 if rolling else 12,
    4,
    length_shape=(2,) if ragged else (),
    rolling=rolling,
  )

  @jax.jit
  def step(inputs, held, lengths):
    return multi_head_attention(
      *[inputs] * 3, *weights, cache=held, lengths=lengths, **options
    )

  assert_decodes(step, held, tokens, want, ragged)


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("method", ["attend_projected", "weights_projected"])
def test_query_offsets_of_examples_are_those_of_calls_of_their_own(
  method, length
):
  memory, queries = single(3, (2, 5, 8), (2, length, 8))
  module = MultiHeadAttention(2, rotary=True, score="shaw")
  variables = module.init(jax.random.key(0), memory)
  projected = module.apply(variables, memory, method="project")

  @jax.jit
  def call(queries, projected, offset):
    return module.apply(
      variables, queries, projected, query_offset=offset, method=method
    )

  offsets = jnp.array([1, 3])
  want = [
    call(*jax.tree.map(lambda x, n=n: x[n : n + 1], (queries, projected)), each)
    for n, each in enumerate(offsets)
  ]
  got = call(queries, projected, offsets)
  close(got, np.concatenate(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["attend_projected", "weights_projected"])
@pytest.mark.parametrize(
  ("argument", "given", "error"),
  [
    ("query_offset", np.array([1, 2, 3]), AssertionError),
    ("query_offset", 1.5, TypeError),
    ("key_lengths", np.array([1, 2, 3]), AssertionError),
  ],
)
def test_wrong_offsets_and_lengths_of_examples_raise(
  method, argument, given, error
):
  tokens = jnp.ones((2, 3, 4))
  module = MultiHeadAttention(2, score="local_p")
  variables = module.init(jax.random.key(0), tokens)
  projected = module.apply(variables, tokens, method="project")
  with pytest.raises(error, match=f"^{argument} "):
    module.apply(
      variables, tokens, projected, method=method, **{argument: given}
    )


@pytest.mark.parametrize(
  ("score", "argument"), [("shaw", "query_offset"), ("local_p", "key_lengths")]
)
def test_numbers_of_examples_broadcast_to_several_leading_axes(score, argument):
  (tokens,) = single(3, (2, 3, 4, 8))
  module = MultiHeadAttention(2, rotary=True, score=score)
  variables = module.init(jax.random.key(0), tokens)
  projected = module.apply(variables, tokens, method="project")

  @jax.jit
  def call(numbers):
    options = {argument: numbers, "method": "attend_projected"}
    return module.apply(variables, tokens, projected, **options)

  numbers = np.array([4, 2, 3])
  got, want = map(call, (numbers, np.broadcast_to(numbers, (2, 3))))
  close(got, want, rtol=1e-6)


def test_a_ragged_cache_refuses_scores_with_parameters_for_each_example():
  tokens, weight = jnp.ones((2, 3, 6)), jnp.ones((6, 2, 3))
  score = scores.forgetting(scores.dot(), jnp.ones((2, 2, 4)))
  with pytest.raises(NotImplementedError, match="one length for all examples"):
    multi_head_attention(
      *[tokens] * 3,
      *[weight] * 3,
      jnp.ones((2, 3, 6)),
      score=score,
      cache=cache.init((2, 2), 4, 3, length_shape=(2,)),
    )
