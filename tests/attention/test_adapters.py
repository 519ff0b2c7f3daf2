"""The adapters, compared with the functions of JAX and Flax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import biases, flax_attention_fn, scores
from tests.attention.comparison import close, jitted
from tests.attention.oracle import single
from tests.matrix import sampled, sampled_product

dot_product_attention = jitted(attention.dot_product_attention)
LENGTHS = jnp.array([2, 7])


CHOICES = {
  "plain": {},
  "scale": {"scale": 0.3},
  "causal": {"is_causal": True},
  "lengths": {
    "query_seq_lengths": jnp.array([3, 6]),
    "key_value_seq_lengths": LENGTHS,
  },
  "key lengths": {"key_value_seq_lengths": LENGTHS},
  "window": {"local_window_size": 2},
  "left window": {"local_window_size": (3, 0), "is_causal": True},
  "mask": {
    "mask": jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 7)) < 0.8)
    | (jnp.arange(7) == 0).reshape(1, 1, 1, 7)
  },
  "head mask": {
    "mask": jnp.asarray(np.random.default_rng(1).random((2, 4, 6, 7)) < 0.8)
    | (jnp.arange(7) == 0).reshape(1, 1, 1, 7)
  },
  "bias": {"bias": single(2, (1, 4, 6, 7))[0]},
  "everything": {
    "bias": single(3, (2, 4, 6, 7))[0],
    "key_value_seq_lengths": LENGTHS,
    "local_window_size": (4, 3),
    "return_residual": True,
  },
}


@sampled(
  ("choice", "num_key_value_heads"),
  [(choice, 4 if place % 2 else 2) for place, choice in enumerate(CHOICES)]
  + [("everything", 1), ("head mask", 1)],
  default=[("everything", 1), ("lengths", 4)],
)
def test_context_and_gradients_equal_jax_nn(choice, num_key_value_heads):
  query, key, value = single(
    0,
    (2, 6, 4, 8),
    (2, 7, num_key_value_heads, 8),
    (2, 7, num_key_value_heads, 8),
  )
  arguments = dict(CHOICES[choice])

  def loss(function):
    def scalar(query, key, value):
      outputs = function(query, key, value, **arguments)
      context = outputs[0] if isinstance(outputs, tuple) else outputs
      if choice == "window":  # jax.nn differs in the last rows, without keys
        context = context[:, :6]
      return jnp.sum(context**2), outputs

    return jax.jit(jax.grad(scalar, (0, 1, 2), has_aux=True))

  with jax.numpy_rank_promotion("allow"):
    theirs = loss(jax.nn.dot_product_attention)(query, key, value)
  ours = loss(dot_product_attention)(query, key, value)
  close(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_residual_has_the_dtype_of_the_key_and_no_gradient(dtype):
  query, key = (
    each.astype(dtype) for each in single(0, (2, 6, 4, 8), (2, 7, 2, 8))
  )

  def lse(function, query):
    return function(query, key, key, return_residual=True)[1]

  def total(query):
    found = lse(attention.dot_product_attention, query)
    return jnp.sum(found), found

  gradient, ours = jax.jit(jax.grad(total, has_aux=True))(query)
  with jax.numpy_rank_promotion("allow"):
    theirs = lse(jax.nn.dot_product_attention, query)
  assert ours.dtype == theirs.dtype == dtype
  np.testing.assert_allclose(
    *(np.asarray(each, np.float32) for each in (ours, theirs)), rtol=1e-2
  )
  assert not np.asarray(gradient).any()


def test_unbatched_tokens_and_a_bias_of_this_library():
  query, key = single(0, (6, 4, 8), (7, 2, 8))
  bias = biases.alibi(4)
  with jax.numpy_rank_promotion("allow"):
    expected = jax.jit(jax.nn.dot_product_attention)(
      query, key, key, bias.materialize(6, 7)[None]
    )
  close(
    dot_product_attention(query, key, key, bias), expected, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize(
  "options",
  [
    {"mask": CHOICES["head mask"]["mask"][:1], "return_residual": True},
    {"query_seq_lengths": LENGTHS[:1], "key_value_seq_lengths": LENGTHS[1:]},
  ],
)
def test_masks_and_lengths_of_unbatched_tokens(options):
  query, key = single(0, (6, 4, 8), (7, 2, 8))
  with jax.numpy_rank_promotion("allow"):
    expected = jitted(jax.nn.dot_product_attention)(query, key, key, **options)
  got = dot_product_attention(query, key, key, **options)
  close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_row_without_keys_is_zero():
  query, key = single(0, (1, 3, 2, 4), (1, 5, 2, 4))
  context = dot_product_attention(
    query, key, key, key_value_seq_lengths=jnp.array([0])
  )
  assert not context.any()


@sampled_product(
  ("rate", "broadcast_dropout"),
  ([0.0, 0.4], [True, False]),
  default=[(0.4, True)],
)
def test_flax_layer_gives_equal_outputs_with_our_function(
  rate, broadcast_dropout
):
  (tokens,) = single(0, (2, 6, 8))
  mask = np.tri(6)[None, None]
  outputs = []
  for attention_fn in (nn.dot_product_attention, flax_attention_fn()):
    layer = nn.MultiHeadDotProductAttention(
      4,
      dropout_rate=rate,
      broadcast_dropout=broadcast_dropout,
      attention_fn=attention_fn,
    )
    with jax.numpy_rank_promotion("allow"):
      if not outputs:
        variables = jax.jit(functools.partial(layer.init, deterministic=True))(
          jax.random.key(0), tokens, mask=mask
        )
      apply = jax.jit(functools.partial(layer.apply, deterministic=False))
      rngs = {"dropout": jax.random.key(1)}
      outputs.append(apply(variables, tokens, mask=mask, rngs=rngs))
  np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


def test_function_for_flax_uses_its_score_and_rejects_einsums():
  query, key = single(0, (2, 6, 4, 8), (2, 7, 4, 8))
  attention_fn = flax_attention_fn(scores.cosine(5.0))

  @jax.jit
  def run(query, key):
    got = attention_fn(query, key, key, deterministic=True)
    query, key = (each.swapaxes(1, 2) for each in (query, key))
    weights = jax.nn.softmax(scores.cosine_score(query, key, 5.0))
    return got, (weights @ key).swapaxes(1, 2)

  close(*run(query, key), rtol=1e-4, atol=1e-5)
  with pytest.raises(ValueError, match="precision"):
    attention_fn(query, key, key, precision=("high", "highest"))
  with pytest.raises(NotImplementedError, match="einsum"):
    attention_fn(query, key, key, qk_attn_weights_einsum=jnp.einsum)


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_of_another_number_of_examples_raise(name):
  tokens = jnp.ones((2, 3, 1, 4))
  with pytest.raises(AssertionError, match=rf"{name} .* must be \(2,\)"):
    dot_product_attention(*[tokens] * 3, **{name: jnp.array([1, 2, 3])})
