"""`jax.export`: symbolic sizes, and masks, scores and others as arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attention import attend, biases, masks, normalizers, positions, scores
from attention.modules import MultiHeadAttention
from tests.attention.comparison import close
from tests.attention.oracle import single
from tests.matrix import sampled

WEIGHT, VECTOR = single(0, (4, 4), (4,))
CALLS = {
  "dot": lambda: {"mask": masks.causal()},
  "additive": lambda: {"score": scores.additive(WEIGHT, WEIGHT, VECTOR)},
  "concat": lambda: {
    "score": scores.concat(jnp.concatenate([WEIGHT, WEIGHT]), VECTOR)
  },
  "dropout": lambda: {"dropout_rate": 0.3, "rng": jax.random.key(0)},
  "function": lambda: {"score": lambda query, key: jnp.tanh(query @ key.mT)},
  "location": lambda: {"score": scores.location(WEIGHT)},
  "local_m": lambda: {"score": scores.local(scores.dot(), 2)},
  "local_p": lambda: {"score": scores.local(scores.dot(), 2, WEIGHT, VECTOR)},
  "shaw": lambda: {"score": scores.shaw(WEIGHT[:3])},
  "disentangled": lambda: {"score": scores.disentangled(WEIGHT, WEIGHT)},
  "transformer_xl": lambda: {
    "score": scores.transformer_xl(WEIGHT, VECTOR, VECTOR)
  },
  "modified": lambda: {
    "score": scores.modified(scores.dot(), lambda scores, i, j: scores - i + j)
  },
  "where": lambda: {"mask": masks.where(lambda i, j: i >= j)},
  "sink": lambda: {"normalizer": normalizers.softmax(0.5)},
  "entmax": lambda: {"normalizer": normalizers.entmax()},
  "stick_breaking": lambda: {"normalizer": normalizers.stick_breaking()},
}


@sampled(
  "name", CALLS, default=["additive", "dropout", "shaw", "stick_breaking"]
)
def test_reference_with_symbolic_lengths(name):
  length, key_length = export.symbolic_shape("t, s")
  arguments = CALLS[name]()

  def loss(query, key):
    context = attend(query, key, key, implementation="reference", **arguments)
    return jnp.sum(jnp.sin(context))

  function = jax.jit(jax.value_and_grad(loss, (0, 1)))
  exported = export.export(function)(
    jax.ShapeDtypeStruct((2, length, 4), jnp.float32),
    jax.ShapeDtypeStruct((2, key_length, 4), jnp.float32),
  )
  tokens = single(1, (2, 5, 4), (2, 7, 4))
  close(exported.call(*tokens), function(*tokens), rtol=1e-5, atol=1e-6)


def test_forget_gates_of_symbolic_length():
  (length,) = export.symbolic_shape("s")

  def decayed(query, log_gates):
    score = scores.forgetting(scores.dot(), log_gates)
    return attend(query, query, query, score=score, implementation="reference")

  exported = export.export(jax.jit(decayed))(
    jax.ShapeDtypeStruct((length, 4), jnp.float32),
    jax.ShapeDtypeStruct((length,), jnp.float32),
  )
  query, gates = single(2, (6, 4), (6,))
  run = jax.jit(decayed)
  np.testing.assert_allclose(
    exported.call(query, gates), run(query, gates), 1e-5, 1e-6
  )
  with_four = export.export(jax.jit(lambda query: decayed(query, VECTOR)))
  with pytest.raises(AssertionError, match="log_gates has 4 positions"):
    with_four(jax.ShapeDtypeStruct((length, 4), jnp.float32))
  (length,) = export.symbolic_shape("s", constraints=["s <= 4"])
  exported = with_four(jax.ShapeDtypeStruct((length, 4), jnp.float32))
  np.testing.assert_allclose(
    exported.call(query[:3]), run(query[:3], VECTOR), 1e-5, 1e-6
  )


def test_rotary_positions_of_symbolic_length():
  (length,) = export.symbolic_shape("t")
  rotary = jax.jit(positions.rotary)
  exported = export.export(rotary)(
    jax.ShapeDtypeStruct((2, length, 4), jnp.float32)
  )
  (tokens,) = single(1, (2, 5, 4))
  close(exported.call(tokens), rotary(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", ["scaled_dot", "shaw"])
@pytest.mark.parametrize("rolling", [False, True])
def test_decoding_a_symbolic_number_of_examples(score, rolling):
  (batch,) = export.symbolic_shape("b")
  layer = MultiHeadAttention(2, 4, score=score, rotary=True)
  (tokens,) = single(2, (3, 1, 6))
  variables = layer.init(jax.random.key(0), tokens)

  def decode(tokens):
    cache = layer.apply(
      variables,
      tokens.shape[:1],
      5,
      ragged=True,
      rolling=rolling,
      method="init_cache",
    )
    return layer.apply(variables, tokens, cache, method="decode")

  decode = jax.jit(decode)
  exported = export.export(decode)(
    jax.ShapeDtypeStruct((batch, 1, 6), jnp.float32)
  )
  close(exported.call(tokens), decode(tokens), rtol=1e-5, atol=1e-6)


IDS = jnp.arange(3)
OBJECTS = {
  "band": lambda: masks.causal(),
  "lengths": lambda: masks.padding(jnp.ones(2, int)) & masks.prefix(2),
  "segments": lambda: ~masks.segments(IDS, IDS),
  "array": lambda: masks.as_mask(jnp.ones((2, 2), bool)).shifted(jnp.int32(1)),
  "alibi": lambda: biases.alibi(4).grouped(2, 2),
  "relative": lambda: biases.relative_position(jnp.ones((8, 2))),
  "sum": lambda: biases.as_bias(jnp.ones((2, 2))) - 2 * biases.alibi(2),
  "positions": lambda: biases.alibi(4).at(IDS),
  "heads": lambda: biases.alibi(4).of_heads(jnp.int32(0), 2, 4),
  "dot": scores.dot,
  "scaled_dot": scores.scaled_dot,
  "general": lambda: scores.MappedKeys(scores.general(WEIGHT)),
  "additive": lambda: scores.additive(WEIGHT, WEIGHT, VECTOR),
  "concat": lambda: scores.concat(WEIGHT, VECTOR),
  "cosine": lambda: scores.cosine(2.0),
  "capped": lambda: scores.soft_cap(scores.dot(), 2.0),
  "shaw": lambda: scores.shaw(WEIGHT[:3]),
  "local": lambda: scores.local(scores.dot(), 2, WEIGHT, VECTOR),
  "forgetting": lambda: scores.forgetting(scores.dot(), VECTOR),
  "sink": lambda: normalizers.softmax(jnp.ones(2)),
  "sigmoid": lambda: normalizers.sigmoid(-1.0),
  "softpick": normalizers.softpick,
  "signed": normalizers.signed_softmax,
  "entmax": lambda: normalizers.entmax(1.3),
  "sparsemax": normalizers.sparsemax,
  "stick_breaking": normalizers.stick_breaking,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_serialised_function_takes_masks_biases_and_scores(name):
  pytest.importorskip("flatbuffers")
  given = OBJECTS[name]()
  exported = export.export(jax.jit(lambda given, x: 2 * x))(given, 1.0)
  restored = export.deserialize(exported.serialize())
  assert restored.in_tree == exported.in_tree
  assert restored.call(given, 3.0) == 6.0
