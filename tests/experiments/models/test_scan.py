"""The scan whose weight gradients are one product each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.rnn.scan import scan
from tests.matrix import sampled


def step(weights, others, carry, x):
  """Two products, the second of what the first one gave."""
  bias, visible = others
  hidden = jnp.tanh(carry @ weights["recurrent"] + x + bias)
  carry = jnp.where(visible, hidden @ weights["out"], carry)
  return carry, (hidden, carry.sum())


def arguments(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 5)
  shapes = [(4, 3), (3, 4), (1, 3), (5, 4), (7, 5, 3)]
  recurrent, out, bias, carry, xs = (
    jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)
  )
  visible = jnp.array([[True], [True], [False], [True], [True]])
  return {"recurrent": recurrent, "out": out}, (bias, visible), carry, xs


def loss(run, weights, others, carry, xs, reverse):
  carry, (hidden, sums) = run(step, weights, others, carry, xs, reverse=reverse)
  return (
    jnp.sum(carry**2) + jnp.sum(jnp.sin(hidden)) + jnp.sum(sums * sums)
  ).astype(jnp.float32)


def plain(step, weights, others, carry, xs, reverse):
  return jax.lax.scan(
    lambda carry, x: step(weights, others, carry, x), carry, xs, reverse=reverse
  )


@sampled("reverse", [False, True], default=[True])
@sampled("jitted", [False, True], default=[True])
def test_values_and_gradients_match_a_plain_loop(reverse, jitted):
  def everything(run):
    def value(weights, bias, visible, carry, xs):
      return loss(run, weights, (bias, visible), carry, xs, reverse)

    gradient = jax.value_and_grad(value, (0, 1, 3, 4))
    weights, (bias, visible), carry, xs = arguments()
    compute = jax.jit(gradient) if jitted else gradient
    return compute(weights, bias, visible, carry, xs)

  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(
      one, other, rtol=2e-5, atol=1e-6 * np.abs(other).max()
    ),
    everything(scan),
    everything(plain),
  )


@pytest.mark.exhaustive
def test_gradients_have_the_dtype_of_the_weights():
  weights, others, carry, xs = arguments(jnp.bfloat16)
  gradients = jax.grad(loss, 1)(scan, weights, others, carry, xs, False)
  assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {
    jnp.dtype("bfloat16")
  }


def test_weight_gradients_are_not_summed_in_the_loop():
  weights, others, carry, xs = arguments()
  jaxpr = jax.make_jaxpr(jax.grad(loss, 1), static_argnums=(0, 5))
  shapes = {weight.shape for weight in weights.values()}

  def sums(run):
    loops = [
      equation.params["jaxpr"].jaxpr
      for equation in jaxpr(run, weights, others, carry, xs, False).eqns
      if equation.primitive.name == "scan"
    ]
    return [
      equation
      for loop in loops
      for equation in loop.eqns
      if equation.primitive.name in ("add_any", "dot_general")
      and equation.outvars[0].aval.shape in shapes
    ]

  assert len(sums(plain)) >= 2
  assert not sums(scan)


@pytest.mark.parametrize(
  ("faulty", "message"),
  [
    (lambda w, _, c, x: (c @ w @ w + x, None), "only once"),
    (lambda w, _, c, x: (c + x, None), "every weight"),
  ],
)
def test_step_must_use_each_weight_once(faulty, message):
  def value(weight):
    ones = jnp.ones((2, 2))
    return scan(faulty, weight, None, ones, jnp.ones((3, 2, 2)))[0].sum()

  with pytest.raises(ValueError, match=message):
    jax.grad(value)(jnp.eye(2))
