"""Losses, metrics, schedules and tables: small functions, known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sacrebleu

from configs import base
from experiments import evaluation, losses, metrics
from experiments.data.batch import Batch
from experiments.optimizer import make_optimizer, make_schedule
from experiments.schema import OptimizerConfig


def optimizer_config(**changes):
  return OptimizerConfig(**{**base.optimizer(), **changes})


def test_cross_entropy_is_optax_where_tokens_are_real():
  logits = jax.random.normal(jax.random.key(0), (2, 3, 7))
  labels = jnp.array([[3, 4, 0], [6, 0, 0]])
  for smoothing in (0.0, 0.1):
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 7), smoothing)
    expected = optax.softmax_cross_entropy(logits, smooth)
    np.testing.assert_allclose(
      losses.cross_entropy(logits, labels, label_smoothing=smoothing),
      jnp.where(labels == 0, 0, expected),
      rtol=1e-5,
    )


def test_cross_entropy_of_bfloat16_logits_is_float32():
  logits = jnp.ones((1, 1, 1000), jnp.bfloat16)
  loss = losses.cross_entropy(logits, jnp.array([[5]]))
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(loss[0, 0], np.log(1000), rtol=1e-6)


def test_cross_entropy_names_what_does_not_fit():
  with pytest.raises(AssertionError, match="logits"):
    losses.cross_entropy(jnp.zeros((2, 3, 7)), jnp.zeros((2, 4), int))


TARGET = np.array([[3, 4, 5, 2], [6, 2, 0, 0]])
SOURCE = np.array([[5, 4, 3, 2], [6, 2, 0, 0]])
PREDICTED = np.array([[3, 4, 6, 2], [6, 2, 0, 0]])


def test_scores_count_tokens_and_whole_sequences():
  scores = metrics.score(
    Batch(SOURCE, TARGET), PREDICTED, np.array([4.0, 2.0]), np.array([4, 2])
  )
  assert scores["token_accuracy"] == pytest.approx(5 / 6)
  assert scores["sequence_accuracy"] == pytest.approx(1 / 2)
  assert scores["loss"] == pytest.approx(1.0)
  assert scores["perplexity"] == pytest.approx(np.e)


def test_scores_by_length_add_up():
  rows = metrics.score_by_length(
    Batch(SOURCE, TARGET), PREDICTED, np.array([4.0, 2.0]), np.array([4, 2])
  )
  assert [(row["length"], row["count"], row["tokens"]) for row in rows] == [
    (1, 1, 2),
    (3, 1, 4),
  ]
  assert [row["sequence_accuracy"] for row in rows] == [1.0, 0.0]


def test_an_answer_that_never_ends_is_wrong():
  target = np.array([[3, 4, 2]])
  scores = metrics.score(
    Batch(target, target), np.array([[3, 4, 4]]), np.ones(1), np.ones(1)
  )
  assert scores["sequence_accuracy"] == 0.0
  assert scores["token_accuracy"] == pytest.approx(2 / 3)


def test_bleu_is_that_of_sacrebleu():
  rng = np.random.default_rng(0)
  references = [rng.integers(3, 9, size=12) for _ in range(20)]
  predicted = [np.append(row[:8], row[:3]) for row in references]
  text = [
    [" ".join(map(str, row)) for row in rows]
    for rows in (
      predicted,
      references,
    )
  ]
  expected = sacrebleu.BLEU(tokenize="none").corpus_score(text[0], [text[1]])
  assert metrics.bleu(predicted, references) == pytest.approx(expected.score)
  assert 0 < expected.score < 100


def test_bleu_of_answers_of_one_token_counts_unigrams():
  one, other = np.array([5]), np.array([6])
  assert metrics.bleu([one, other], [one, other]) == pytest.approx(100)
  assert metrics.bleu([one, other], [one, one]) == pytest.approx(50)


@pytest.mark.parametrize(
  ("schedule", "last"),
  [("constant", 1.0), ("cosine", 0.0), ("linear", 0.0), ("inverse_sqrt", 0.1)],
)
def test_schedules_rise_to_the_peak_and_fall(schedule, last):
  config = optimizer_config(
    learning_rate=1.0, schedule=schedule, warmup_steps=10
  )
  rate = make_schedule(config, num_steps=1000)
  rising = [float(rate(step)) for step in range(11)]
  assert rising == sorted(rising)
  assert 0 < rising[0] < rising[9] < rising[10] == 1.0
  assert float(rate(1000)) == pytest.approx(last, abs=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adafactor"])
def test_every_optimizer_goes_downhill(name):
  config = optimizer_config(
    name=name,
    learning_rate=0.1,
    schedule="constant",
    warmup_steps=0,
    weight_decay=0.1 if name == "adamw" else 0.0,
  )
  optimizer = make_optimizer(config, num_steps=50)
  params = {"w": jnp.ones((4, 4))}
  loss = lambda params: jnp.square(params["w"]).sum()  # noqa: E731

  @jax.jit
  def step(carry, _):
    params, state = carry
    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return (optax.apply_updates(params, updates), state), None

  (after, _), _ = jax.lax.scan(
    step, (params, optimizer.init(params)), length=50
  )
  assert loss(after) < 0.5 * loss(params)


def test_gradients_are_clipped_to_the_norm():
  config = optimizer_config(
    name="sgd",
    learning_rate=1.0,
    schedule="constant",
    warmup_steps=0,
    b1=0.0,
    clip_norm=0.5,
  )
  optimizer = make_optimizer(config, num_steps=2)
  params = {"w": jnp.zeros(4)}
  updates, _ = optimizer.update(
    {"w": jnp.full(4, 100.0)}, optimizer.init(params), params
  )
  assert float(optax.tree.norm(updates)) == pytest.approx(0.5)


def test_the_table_pools_lengths_by_their_tokens():
  rows = [
    {"length": n, "count": 2, "tokens": 2 * n, "token_accuracy": 1.0 * (n > 1),
     "sequence_accuracy": 0.5}
    for n in range(1, 21)
  ]  # fmt: skip
  lines = evaluation.table(rows, num_bins=10).splitlines()
  assert len(lines) == 11
  assert lines[1].split() == ["1-2", "4", "66.67%", "50.00%"]
  assert lines[-1].split()[0] == "19-20"
