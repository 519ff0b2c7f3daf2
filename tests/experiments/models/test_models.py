"""Models: causality, padding, and steps that agree with the whole."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import decoding
from experiments.data.batch import BOS, EOS, PAD
from tests.experiments.toys import make_rnn, make_transformer, random_parameters
from tests.matrix import sampled

VOCABULARY = 11


def rnn(source_vocabulary_size=VOCABULARY, **options):
  return make_rnn(source_vocabulary_size, VOCABULARY, **options)


def transformer(source_vocabulary_size=VOCABULARY, **options):
  return make_transformer(source_vocabulary_size, VOCABULARY, **options)


# Every score, order, query, readout, cell, norm and kind of position at least
# once; all other models differ from one of these in a single choice.
MODELS = {
  "none-luong": rnn(attention="none"),
  "none-bahdanau": rnn(attention="none", order="bahdanau"),
  "additive-bahdanau-fed": rnn(
    attention="additive",
    source_vocabulary_size=13,
    encoder_size=10,
    order="bahdanau",
    input_feeding=True,
  ),
  "dot-luong": rnn(attention="dot"),
  "scaled_dot-luong-fed-linear": rnn(
    attention="scaled_dot", input_feeding=True, readout="linear"
  ),
  "general-lstm-state-deep": rnn(
    attention="general",
    encoder_layers=2,
    decoder_layers=2,
    cell="lstm",
    query="state",
    order="bahdanau",
  ),
  "concat-forward-state": rnn(
    attention="concat",
    bidirectional=False,
    encoder_size=7,
    decoder_layers=2,
    query="state",
    readout="linear",
  ),
  "cosine-lstm": rnn(attention="cosine", cell="lstm"),
  "general-signed_softmax-luong": rnn(
    attention="general", normalizer="signed_softmax"
  ),
  "additive-sigmoid-bahdanau": rnn(
    attention="additive", normalizer="sigmoid", order="bahdanau"
  ),
  "dot-entmax-luong-fed": rnn(
    attention="dot", normalizer="entmax", input_feeding=True
  ),
  "location-luong": rnn(attention="location"),
  "local_m-luong": rnn(attention="local_m", window=1),
  "local_m-bahdanau": rnn(attention="local_m", order="bahdanau"),
  "local_p-luong-fed": rnn(attention="local_p", input_feeding=True, window=2),
  "local_p-luong": rnn(attention="local_p", normalizer="softmax_sink"),
  "transformer": transformer(),
  "transformer-shaw-none": transformer(
    score="shaw", positions="none", max_distance=2
  ),
  "transformer-disentangled-none": transformer(
    score="disentangled", positions="none", max_distance=2
  ),
  "transformer-local_m-none": transformer(
    score="local_m", positions="none", window=2
  ),
  "transformer-local_p-none": transformer(
    score="local_p", positions="none", window=2, decoder_layers=2
  ),
  "transformer-local_p-soft_cap-sink-rotary": transformer(
    score="local_p",
    score_wrapper="soft_cap",
    normalizer="softmax_sink",
    positions="rotary",
    forget_gate=True,
  ),
  "transformer-forgetting-none": transformer(
    score="forgetting", positions="none"
  ),
  "transformer-transformer_xl-none": transformer(
    score="transformer_xl", positions="none"
  ),
  "transformer-softmax_sink-alibi": transformer(
    normalizer="softmax_sink", positions="alibi"
  ),
  "transformer-stick_breaking-none": transformer(
    normalizer="stick_breaking", positions="none"
  ),
  "transformer-additive-rotary": transformer(
    score="additive", positions="rotary"
  ),
  "transformer-general-soft_cap-learned-post": transformer(
    score="general",
    score_wrapper="soft_cap",
    soft_cap=0.5,
    positions="learned",
    norm="post",
    tied_embeddings=False,
  ),
  "transformer-cosine-temperature-none": transformer(
    score="cosine", score_wrapper="temperature", positions="none"
  ),
  "transformer-concat-alibi-forget": transformer(
    score="concat", positions="alibi", forget_gate=True, decoder_layers=2
  ),
  "transformer-forget-none": transformer(forget_gate=True, positions="none"),
  "transformer-qk_norm-two-vocabularies": transformer(
    score_wrapper="qk_norm", source_vocabulary_size=13, shared_vocabulary=False
  ),
}

# Normalizers whose weights sum to one.
SUM_TO_ONE = ("softmax", "entmax", "sparsemax")

SOURCE = np.array([[3, 4, 5, 6, EOS], [7, 8, EOS, PAD, PAD]])
TARGET = np.array([[6, 5, 4, 3, EOS], [8, 7, EOS, PAD, PAD]])


@functools.cache
def parameters(name):
  return random_parameters(MODELS[name], SOURCE, TARGET)


@functools.cache
def forward(name):
  return jax.jit(
    lambda params, source, target: MODELS[name].apply(
      {"params": params}, source, target
    )
  )


# The models of the default suite; the others are exhaustive.
DEFAULT = (
  "additive-bahdanau-fed",
  "general-signed_softmax-luong",
  "general-lstm-state-deep",
  "transformer-additive-rotary",
  "transformer-general-soft_cap-learned-post",
)


def replaced(tokens, row, place, token):
  """A copy of tokens with another token at a place."""
  changed = tokens.copy()
  changed[row, place] = token
  return changed


def logits_of(name, source=SOURCE, target=TARGET):
  return np.array(forward(name)(parameters(name), source, target))


@sampled("name", MODELS, default=["transformer-additive-rotary"])
def test_logits_depend_on_earlier_target_tokens_only(name):
  before = logits_of(name)
  after = logits_of(name, target=replaced(TARGET, slice(None), 2, 9))
  np.testing.assert_array_equal(before[:, :3], after[:, :3])
  assert (before[:, 3] != after[:, 3]).any()


@sampled("name", MODELS, default=["transformer-additive-rotary"])
def test_source_padding_does_not_change_logits(name):
  wider = np.pad(SOURCE, ((0, 0), (0, 3)))
  np.testing.assert_allclose(
    logits_of(name), logits_of(name, source=wider), atol=1e-5
  )


@sampled("name", MODELS, default=["additive-bahdanau-fed"])
def test_logits_depend_on_every_source_token(name):
  before = logits_of(name)
  for place in range(4):
    after = logits_of(name, source=replaced(SOURCE, 0, place, 10))
    assert (before[0] != after[0]).any()
    np.testing.assert_array_equal(before[1], after[1])


@sampled(
  "name",
  MODELS,
  default=[
    "additive-bahdanau-fed",
    "general-signed_softmax-luong",
    "transformer-additive-rotary",
  ],
)
def test_decoding_steps_agree_with_teacher_forcing(name):
  """Decoding step by step, with caches, gives what training computes."""
  model, variables = MODELS[name], {"params": parameters(name)}

  @jax.jit
  def follow(variables, source, inputs):
    memory, carry = model.apply(variables, source, 5, method="start")

    def step(carry, token):
      carry, logits, weights = model.apply(
        variables, memory, carry, token, method="step"
      )
      return carry, (logits, weights)

    return jax.lax.scan(step, carry, inputs.T)[1]

  inputs = np.pad(TARGET[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
  logits, weights = follow(variables, SOURCE, inputs)
  logits, weights = np.asarray(logits), np.asarray(weights)
  np.testing.assert_allclose(logits.swapaxes(0, 1), logits_of(name), atol=2e-5)
  if "local_" in name:
    assert (weights.sum(-1) < 1 + 1e-5).all()
  elif MODELS[name].config.normalizer in SUM_TO_ONE:
    total = 0 if name.startswith("none") else 1
    np.testing.assert_allclose(weights.sum(-1), total, atol=1e-5)
  else:
    assert (np.abs(weights.sum(-1) - 1) > 1e-5).any()
  assert (weights[:, 1, :, 3:] == 0).all()


@sampled("name", MODELS, default=["transformer-additive-rotary"])
def test_all_parameters_receive_gradients(name):
  loss = lambda params: jnp.sin(  # noqa: E731
    forward(name)(params, SOURCE, TARGET)
  ).sum()
  grads = jax.jit(jax.grad(loss))(parameters(name))
  dead = [
    jax.tree_util.keystr(path)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads)
    if np.abs(np.asarray(grad)).max() < 1e-7
  ]
  # A constant added to all scores of a query does not change a softmax.
  assert [each for each in dead if "key_projection']['bias" not in each] == []


@sampled("name", MODELS, default=DEFAULT)
def test_readout_maps_features_to_the_vocabulary(name):
  model = MODELS[name]
  init = jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)
  features, readout = jax.eval_shape(
    lambda variables: model.apply(variables, SOURCE, TARGET, method="features"),
    init,
  )
  assert features.shape[:2] == TARGET.shape
  assert readout.kernel.shape == (features.shape[2], VOCABULARY)


@pytest.mark.parametrize(
  ("tied", "shared", "matrices"),
  [
    (True, True, {"embedding": VOCABULARY}),
    (True, False, {"embedding": VOCABULARY, "source_embedding": 13}),
    (
      False,
      True,
      {"embedding": VOCABULARY, "source_embedding": 13, "output": VOCABULARY},
    ),
  ],
)
def test_tied_embeddings_share_matrices(tied, shared, matrices):
  model = transformer(
    source_vocabulary_size=VOCABULARY if tied and shared else 13,
    tied_embeddings=tied,
    shared_vocabulary=shared,
  )
  init = jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)
  shapes = {
    name: jax.tree.leaves(part)[-1].shape
    for name, part in init["params"].items()
    if "embedding" in name or name == "output"
  }
  vocabularies = {name: max(set(shape) - {8}) for name, shape in shapes.items()}
  assert vocabularies == matrices


@pytest.mark.exhaustive
def test_forgetting_is_scaled_dot_with_forget_gates():
  name, other = "transformer-forgetting-none", "transformer-forget-none"
  assert "forget_gate" in parameters(name)["decoder_0"]
  jax.tree.map(
    np.testing.assert_array_equal, parameters(name), parameters(other)
  )
  np.testing.assert_array_equal(logits_of(name), logits_of(other))


@sampled("name", MODELS, default=["transformer-additive-rotary"])
def test_greedy_decodes_the_most_likely_token(name):
  greedy = jax.jit(
    lambda params: decoding.greedy(MODELS[name], params, SOURCE, max_length=5)
  )
  tokens = np.asarray(greedy(parameters(name)))
  likely = logits_of(name, target=np.where(tokens == PAD, 3, tokens))
  likely[..., [PAD, BOS]] = -np.inf
  for row, expected in zip(tokens, likely.argmax(-1)):
    real = row != PAD
    np.testing.assert_array_equal(row[real], expected[real])
    ends = np.flatnonzero(row == EOS)
    assert not real[ends[0] + 1 :].any() if ends.size else real.all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [rnn, transformer])
def test_bfloat16_computes_in_bfloat16_with_float32_parameters(make):
  narrow, wide = make(dtype=jnp.bfloat16), make()
  variables = jax.jit(narrow.init)(jax.random.key(0), SOURCE, TARGET)
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(variables)}
  assert dtypes == {jnp.dtype("float32")}
  logits = jax.jit(narrow.apply)(variables, SOURCE, TARGET)
  assert logits.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    logits.astype(jnp.float32),
    jax.jit(wide.apply)(variables, SOURCE, TARGET),
    atol=0.15,
  )


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [rnn, transformer])
def test_dropout_uses_its_rng_in_training_only(make):
  model = make(dropout_rate=0.5)
  variables = jax.jit(make().init)(jax.random.key(0), SOURCE, TARGET)

  @jax.jit
  def train(rng):
    return model.apply(
      variables, SOURCE, TARGET, train=True, rngs={"dropout": rng}
    )

  first, second = jax.random.key(0), jax.random.key(1)
  assert (train(first) == train(first)).all()
  assert (train(first) != train(second)).any()
  np.testing.assert_array_equal(
    jax.jit(model.apply)(variables, SOURCE, TARGET),
    jax.jit(make().apply)(variables, SOURCE, TARGET),
  )


def test_initial_matrices_are_decomposed_one_at_a_time():
  # XLA would run two decompositions of batches in threads that wait forever.
  model = MODELS["none-luong"]
  tokens = jnp.ones((1, 2), jnp.int32)
  program = jax.make_jaxpr(model.init)(jax.random.key(0), tokens, tokens)
  shapes = re.findall(r"\[([\d,]+)\] = qr\[", str(program))
  assert shapes
  assert all(shape.count(",") == 1 for shape in shapes)
