"""Kernels of running sums: exact to the last digit of a difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks, scores
from attention.implementations import Blockwise, Pallas
from attention.implementations.pallas import running_sums as module
from attention.implementations.pallas.running_sums import make_running_sums
from attention.scores import decay
from tests.attention.comparison import equations

params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
KERNELS = Pallas(interpret=True)
SUMS = {
  "xla": decay.running_sums,
  "tpu": make_running_sums("tpu", True),
  "hopper": make_running_sums("hopper", params.InterpretGPUParams()),
}


def draw(shape, seed=0):
  return -np.random.default_rng(seed).random(shape).astype(np.float32)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("shape", [(3,), (9, 300), (2, 3, 128)])
def test_differences_are_as_exact_as_those_of_float64(name, shape):
  numbers = draw(shape) + 1e-6
  sums = jax.jit(SUMS[name])(numbers)
  total, again, rest = np.asarray(sums, np.float64)
  np.testing.assert_array_equal(total, again)
  got = total + rest
  want = np.cumsum(np.asarray(numbers, np.float64), -1)
  # Sums in float32 have errors of 1e-5 here.
  np.testing.assert_allclose(np.diff(got), np.diff(want), atol=2e-8)
  np.testing.assert_allclose(got, want, rtol=1e-7)


@pytest.mark.parametrize("name", SUMS)
def test_derivatives_are_sums_in_every_mode(name):
  numbers, tangent, cotangent = (draw((2, 150), seed) for seed in range(3))

  def sums(numbers):
    total, again, rest = SUMS[name](numbers)
    return total + 2 * again - 2 * total + rest

  def of_square(numbers):
    return jnp.sum(sums(numbers) ** 2 * cotangent)

  @jax.jit
  def derivatives(numbers, tangent, cotangent):
    pushed = jax.jvp(sums, (numbers,), (tangent,))[1]
    (pulled,) = jax.vjp(sums, numbers)[1](cotangent)
    gradient = jax.grad(of_square)
    product = jax.jvp(gradient, (numbers,), (tangent,))[1]
    reverse = jax.grad(lambda numbers: jnp.vdot(gradient(numbers), tangent))
    mapped = jax.vmap(jax.grad(lambda row: jnp.sum(sums(row))))
    return pushed, pulled, product, reverse(numbers), mapped(numbers)

  pushed, pulled, product, reverse, mapped = derivatives(
    numbers, tangent, cotangent
  )
  want = np.cumsum(tangent, -1, np.float64)
  np.testing.assert_allclose(pushed, want, rtol=1e-5)
  want = np.cumsum(cotangent[:, ::-1], -1, np.float64)[:, ::-1]
  np.testing.assert_allclose(pulled, want, rtol=1e-5)
  weighted = np.cumsum(tangent, -1, np.float64) * cotangent
  want = 2 * np.cumsum(weighted[:, ::-1], -1)[:, ::-1]
  np.testing.assert_allclose(product, want, rtol=1e-5)
  np.testing.assert_allclose(reverse, want, rtol=1e-5)
  np.testing.assert_allclose(mapped, np.tile(np.arange(150, 0, -1), (2, 1)))


def test_rows_that_do_not_fit_on_the_chip_are_summed_in_xla(monkeypatch):
  monkeypatch.setattr(module, "_LONGEST", 100)
  for length, kernels in ((100, 1), (101, 0)):
    program = jax.make_jaxpr(SUMS["tpu"])(jnp.ones(length))
    assert str(program).count("pallas_call[") == kernels


@pytest.mark.parametrize(
  ("implementation", "count"),
  [
    ("reference", 1),
    (Blockwise(query_block=8, key_block=8), 1),
    (KERNELS, 0),
  ],
)
def test_sums_are_computed_once_in_a_call(implementation, count):
  score = scores.soft_cap(scores.forgetting(scores.dot(), draw((64,))), 9.0)

  def run(tokens):
    return attend(
      *(tokens,) * 3,
      score=score,
      mask=masks.causal(),
      implementation=implementation,
    )

  program = jax.make_jaxpr(run)(jnp.ones((64, 4)))
  of_xla = equations(program.jaxpr, without=["pallas_call"])
  names = [each.primitive.name for each in of_xla]
  assert names.count("pallas_call") == 2 * (count == 0)
  assert names.count("cumsum") == count
  # Loops would repeat what is in their bodies.
  loops = "scan", "while"
  outside = equations(program.jaxpr, without=["pallas_call", *loops])
  names = [each.primitive.name for each in outside]
  assert names.count("cumsum") == count


def test_positions_that_are_zero_stay_known_outside_of_a_program():
  tokens, log_gates = draw((40, 8), 3), draw((40,), 4)
  score = scores.forgetting(scores.dot(), log_gates).placed(first_head=0)
  results = [
    attend(*(tokens,) * 3, score=score, implementation=each)
    for each in ("reference", KERNELS)
  ]
  np.testing.assert_allclose(*results, atol=1e-5)


def both(loss, array):
  """The gradients of the reference and of kernels."""

  @jax.jit
  def gradients(array):
    return [jax.grad(loss)(array, each) for each in ("reference", KERNELS)]

  return gradients(array)


def test_the_score_itself_receives_gradients_of_log_gates():
  tokens, log_gates = draw((40, 8), 3), draw((40,), 4)

  def loss(score, implementation):
    context = attend(
      *(tokens,) * 3,
      score=score,
      mask=masks.causal(),
      implementation=implementation,
    )
    return jnp.sum(jnp.sin(context))

  score = scores.forgetting(scores.dot(), jnp.asarray(log_gates))
  want, got = both(loss, score)
  assert np.abs(want.log_gates).max() > 1e-3
  np.testing.assert_allclose(got.log_gates, want.log_gates, atol=1e-5)


def test_log_gates_of_more_digits_than_the_tokens():
  tokens = draw((40, 8), 3)

  def loss(log_gates, implementation):
    score = scores.forgetting(scores.dot(), log_gates)
    context = attend(*(tokens,) * 3, score=score, implementation=implementation)
    return jnp.sum(jnp.sin(context))

  with jax.enable_x64(True):
    log_gates = draw((40,), 4).astype(np.float64)
    want, got = both(loss, log_gates)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, atol=1e-5)
