"""Biases of forget gates."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.transformer.forget_gate import decay


def test_decay_of_thousands_of_gates_is_the_sum_of_those_between():
  log_gates = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(0), (2048,)))
  places = np.arange(2048)
  found = decay(log_gates[None, None]).block(places, places, 2)
  total = np.cumsum(np.asarray(log_gates, np.float64))
  want = total[:, None] - total[None, :]
  error = np.abs(np.asarray(found[0, 0], np.float64) - want)
  # Differences of two sums in float32 have errors of 4e-4 for near tokens.
  near = np.abs(places[:, None] - places) < 16
  assert error[near].max() < 1e-5


def test_gradient_of_a_gate_is_that_of_the_pairs_around_it():
  weights, places = jnp.tril(jnp.arange(16.0).reshape(4, 4)), np.arange(4)

  def loss(log_gates):
    bias = decay(log_gates[None, None]).block(places, places, 2)
    return jnp.sum(weights * bias[0, 0])

  gradient = jax.grad(loss)(jnp.array([-0.5, -1.0, -2.0, -0.25]))
  want = [weights[k:, :k].sum() for k in range(4)]
  np.testing.assert_allclose(gradient, want, rtol=1e-6)
