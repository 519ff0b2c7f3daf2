"""Cross-entropy in chunks: value and gradient of the plain formula."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.config import TrainConfig
from experiments.data.batch import PAD, Batch
from experiments.models.layers.affine import Affine
from experiments.optimization import losses
from experiments.optimization.losses import cross_entropy, total_cross_entropy
from experiments.optimization.step import (
  init_state,
  make_loss_step,
  make_train_step,
)
from tests.attention.comparison import close
from tests.experiments.toys import rnn, transformer
from tests.matrix import sampled_product

FEATURES, VOCABULARY = 5, 7


def problem(shape, *, bias=True, dtype=np.float64, seed=0):
  """Features, readout and labels, a third of them PAD."""
  rng = np.random.default_rng(seed)
  readout = Affine(
    rng.normal(size=(FEATURES, VOCABULARY)).astype(dtype),
    rng.normal(size=VOCABULARY).astype(dtype) if bias else None,
  )
  labels = rng.integers(1, VOCABULARY, shape)
  labels = np.where(rng.random(shape) < 1 / 3, PAD, labels)
  features = rng.normal(size=(*shape, FEATURES)).astype(dtype)
  return features, readout, labels


def plain_losses(features, readout, labels, smoothing):
  """The formula as it is written, with all logits at once."""
  logits = features @ readout.kernel
  if readout.bias is not None:
    logits = logits + readout.bias[None, None]
  log_probs = jax.nn.log_softmax(logits)
  target = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
  target = (1 - smoothing) * target + smoothing / logits.shape[-1]
  return jnp.where(labels == PAD, 0, -(target * log_probs).sum(-1))


# One chunk, and several of 64 tokens: none, one and 55 rows are missing.
@sampled_product(
  ("smoothing", "bias", "shape"),
  ([0.0, 0.1], [True, False], [(1, 1), (4, 5), (4, 32), (3, 43), (3, 67)]),
  default=[(0.0, True, (3, 43)), (0.1, True, (1, 1))],
)
def test_value_and_gradient_equal_those_of_the_plain_formula(
  shape, bias, smoothing, monkeypatch
):
  monkeypatch.setattr(losses, "_CHUNK_NUMBERS", 1)
  with jax.enable_x64(True):
    features, readout, labels = problem(shape, bias=bias)
    labels[0, 0] = 3

    def chunked(features, readout):
      total, _ = total_cross_entropy(features, readout, labels, smoothing)
      return 1.7 * total

    def plain(features, readout):
      return 1.7 * plain_losses(features, readout, labels, smoothing).sum()

    @jax.jit
    def everything(*args):
      return (
        cross_entropy(*args, labels, label_smoothing=smoothing),
        chunked(*args),
        jax.value_and_grad(chunked, (0, 1))(*args),
        plain_losses(*args, labels, smoothing),
        jax.grad(plain, (0, 1))(*args),
      )

    (found, hits), value, (total, gradients), expected, wanted = everything(
      features, readout
    )
    assert found.dtype == total.dtype == jnp.float64
    assert found.shape == hits.shape == shape
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(total, 1.7 * expected.sum(), rtol=1e-12)
    np.testing.assert_allclose(value, total, rtol=1e-12)
    close(gradients, wanted, rtol=1e-10, atol=1e-13)


def test_cross_entropy_equals_optax_at_tokens_that_are_not_padding():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 3, 7)).astype(np.float32)
  labels = np.array([[3, 4, 0], [6, 0, 0]])

  def both(smoothing, logits, labels):
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 7), smoothing)
    expected = optax.softmax_cross_entropy(logits, smooth)
    found, _ = cross_entropy(
      logits, Affine(jnp.eye(7), None), labels, label_smoothing=smoothing
    )
    return found, expected

  of_all = jax.jit(lambda *args: [both(each, *args) for each in (0.0, 0.1)])
  for found, expected in of_all(logits, labels):
    np.testing.assert_allclose(
      found, np.where(labels == 0, 0, expected), rtol=1e-5
    )


@pytest.mark.parametrize("chunk_numbers", [1, 1 << 20])
def test_hits_are_labels_with_the_largest_logit(chunk_numbers, monkeypatch):
  monkeypatch.setattr(losses, "_CHUNK_NUMBERS", chunk_numbers)
  features, readout, labels = problem((9, 30), dtype=np.float32)
  # Whole numbers make ties, which are hits too.
  features, kernel = np.round(features), np.round(readout.kernel)
  logits = features @ kernel
  chosen = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
  expected = (chosen == logits.max(-1)) & (labels != PAD)
  ties = (logits == logits.max(-1, keepdims=True)).sum(-1) > 1
  assert (expected & ties).any()
  assert (chosen == logits.max(-1))[labels == PAD].any()
  readout = Affine(kernel, None)

  @jax.jit
  def run(*args):
    value_and_grad = jax.value_and_grad(total_cross_entropy, has_aux=True)
    (_, count), _ = value_and_grad(*args)
    return cross_entropy(*args)[1], count

  hits, count = run(features, readout, labels)
  np.testing.assert_array_equal(hits, expected)
  assert count == expected.sum()


@pytest.mark.parametrize("value", [1e30, -1e30, np.inf, np.nan])
def test_features_at_padding_do_not_change_the_loss(value):
  features, readout, labels = problem((6, 30), dtype=np.float32)
  spoilt = np.where((labels == PAD)[..., None], np.float32(value), features)
  results = [
    jax.tree.map(np.asarray, jax.jit(cross_entropy)(given, readout, labels))
    for given in (features, spoilt)
  ]
  for found, hits in results:
    assert (found[labels == PAD] == 0).all()
    assert not hits[labels == PAD].any()
  jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("value", [0.0, 1e30, -1e30, -np.inf, np.nan])
def test_features_at_padding_do_not_change_the_gradient(value):
  features, readout, labels = problem((6, 30), dtype=np.float32)
  spoilt = np.where((labels == PAD)[..., None], np.float32(value), features)
  gradient = jax.jit(
    jax.grad(lambda *args: total_cross_entropy(*args, labels)[0], (0, 1))
  )
  clean, found = (
    jax.tree.map(np.asarray, gradient(given, readout))
    for given in (features, spoilt)
  )
  jax.tree.map(np.testing.assert_array_equal, found, clean)
  assert (found[0][labels == PAD] == 0).all()
  assert (found[0][labels != PAD] != 0).any(-1).all()


def test_the_loss_of_padding_alone_is_zero():
  features, readout, labels = problem((2, 3), dtype=np.float32)
  value_and_grad = jax.jit(
    jax.value_and_grad(total_cross_entropy, has_aux=True)
  )
  (loss, hits), gradient = value_and_grad(features, readout, 0 * labels)
  assert loss == hits == 0
  assert (gradient == 0).all()


def test_losses_of_bfloat16_are_summed_in_float32():
  count = 4096
  features = np.ones((count, 1, 1), jnp.bfloat16)
  readout = Affine(np.ones((1, 1000), jnp.bfloat16), None)
  labels = np.full((count, 1), 5)

  @jax.jit
  def run(*args):
    value_and_grad = jax.value_and_grad(total_cross_entropy, 1, has_aux=True)
    return cross_entropy(*args)[0], value_and_grad(*args)

  found, ((loss, _), gradient) = run(features, readout, labels)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, np.log(1000), rtol=1e-6)
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(loss, count * np.log(1000), rtol=1e-5)
  # Each token adds a thousandth, which bfloat16 would lose beside the others.
  assert gradient.kernel.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.float32(gradient.kernel)[0, 0], count / 1000, rtol=0.01
  )


def test_bfloat16_is_close_to_float32():
  features, readout, labels = problem((6, 30), dtype=np.float32)
  narrow = jax.tree.map(
    lambda leaf: leaf.astype(jnp.bfloat16), (features, readout)
  )
  value_and_grad = jax.jit(
    jax.value_and_grad(lambda pair: total_cross_entropy(*pair, labels, 0.1)[0])
  )
  found, gradients = value_and_grad(narrow)
  expected, exact = value_and_grad((features, readout))
  np.testing.assert_allclose(found, expected, rtol=0.01)
  for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact)):
    assert one.dtype == jnp.bfloat16
    other = np.asarray(other)
    np.testing.assert_allclose(
      np.float32(one), other, atol=0.03 * np.abs(other).max()
    )


@pytest.mark.parametrize(
  ("features", "readout", "labels", "name"),
  [
    ((2, 3, 5), Affine(np.zeros((5, 7)), None), (2, 4), "features"),
    ((2, 3, 5), Affine(np.zeros((4, 7)), None), (2, 3), "kernel"),
    ((2, 3, 5), Affine(np.zeros((5, 7)), np.zeros(5)), (2, 3), "bias"),
  ],
)
def test_an_argument_of_wrong_shape_is_named(features, readout, labels, name):
  args = np.zeros(features), readout, np.zeros(labels, int)
  for function in (
    cross_entropy,
    total_cross_entropy,
    jax.grad(total_cross_entropy, has_aux=True),
  ):
    with pytest.raises(AssertionError, match=name):
      function(*args)


def largest_array(function, *args):
  """Numbers in the largest array of a compiled program."""
  text = jax.jit(function).lower(*args).compile().as_text()
  shapes = re.findall(r"\b[a-z]\w*\d*\[([\d,]+)\]", text)
  return max(math.prod(map(int, shape.split(","))) for shape in shapes)


PROGRAMS = {
  "losses": cross_entropy,
  "total": total_cross_entropy,
  "gradient": jax.value_and_grad(total_cross_entropy, (0, 1), has_aux=True),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_intermediate_array_holds_all_logits(program, monkeypatch):
  features, _, labels = problem((8, 48), dtype=np.float32)
  kernel = np.zeros((FEATURES, 100), np.float32)
  args = (features, Affine(kernel, None), labels)
  logits = labels.size * 100
  # The chunks are seen to matter: with a single one there is such an array.
  assert largest_array(PROGRAMS[program], *args) >= logits
  jax.clear_caches()
  monkeypatch.setattr(losses, "_CHUNK_NUMBERS", 6400)
  assert largest_array(PROGRAMS[program], *args) < logits / 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [rnn, transformer])
def test_training_and_evaluation_hold_no_array_of_all_logits(make, monkeypatch):
  monkeypatch.setattr(losses, "_CHUNK_NUMBERS", 1)
  vocabulary_size = 500
  model, optimizer = make(vocabulary_size), optax.adam(0.1)
  tokens = np.full((32, 9), 3, np.int32)
  batch = Batch(tokens, tokens)
  state = jax.eval_shape(lambda: init_state(model, optimizer, 0))
  config = TrainConfig(label_smoothing=0.1)
  train_step = make_train_step(model, optimizer, config)
  logits = tokens.size * vocabulary_size
  assert largest_array(train_step, state, batch) < logits / 2
  loss_step = make_loss_step(model)
  assert largest_array(loss_step, state.params, batch) < logits / 2
