"""Linear functions with a transpose of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from attention.transforms.custom_transpose import (
  with_kernel_as_transpose,
  with_transpose,
)
from tests.attention.comparison import close

calls = []


@jax.custom_jvp
def reverse(tokens, cotangent):
  calls.append("reverse")
  return jnp.cos(tokens) * cotangent


@reverse.defjvp
def _(primals, tangents):
  tokens, cotangent = primals
  moved, of_cotangent = tangents
  slope = -jnp.sin(tokens) * moved
  return reverse(*primals), slope * cotangent + jnp.cos(tokens) * of_cotangent


@jax.custom_jvp
def sine(tokens):
  return jnp.sin(tokens)


@sine.defjvp
def _(primals, tangents):
  (tangent,) = with_transpose(
    lambda residuals, arguments: [jnp.cos(residuals[0]) * arguments[0]],
    lambda residuals, cotangents: [reverse(residuals[0], cotangents[0])],
    [*primals],
    [*tangents],
  )
  return sine(*primals), tangent


def test_all_derivatives_are_those_of_the_function():
  point = np.arange(3, dtype=np.float32)
  batch = np.stack([point, 2.0 * point])

  def derivatives(function, point, batch):
    def loss(point):
      return jnp.sum(function(point) ** 2)

    gradient = jax.grad(loss)
    tangent = functools.partial(jax.jvp, tangents=(point,))
    return (
      gradient(point),
      tangent(loss, (point,))[1],
      tangent(gradient, (point,))[1],
      jax.grad(lambda point: jnp.sum(gradient(point)))(point),
      jax.grad(lambda point: tangent(loss, (point,))[1])(point),
      jax.vmap(gradient)(batch),
      jax.grad(lambda batch: jnp.sum(jax.vmap(loss)(batch)))(batch),
      jax.jacfwd(jax.hessian(loss))(point),
    )

  run = jax.jit(derivatives, static_argnums=0)
  close(
    run(sine, point, batch), run(jnp.sin, point, batch), rtol=1e-5, atol=1e-6
  )


def test_reverse_mode_calls_the_transpose_and_forward_mode_does_not():
  calls.clear()
  jax.jvp(sine, (jnp.ones(2),), (jnp.ones(2),))
  assert not calls
  jax.grad(lambda tokens: jnp.sum(sine(tokens)))(jnp.ones(2))
  assert calls == ["reverse"]


def square_with(kernel):
  """A function of two results whose transpose is a kernel."""

  def function(residuals, arguments):
    return [2.0 * residuals[0] * arguments[0], jnp.sum(arguments[0], axis=-1)]

  @jax.custom_jvp
  def square(tokens):
    return [tokens**2, jnp.sum(tokens, axis=-1)]

  @square.defjvp
  def _(primals, tangents):
    moved = with_kernel_as_transpose(function, kernel, [*primals], [*tangents])
    return square(*primals), moved

  return square


def test_a_kernel_receives_none_for_a_result_that_is_not_used():
  received = []

  def kernel(residuals, cotangents):
    received.append(cotangents)
    return [2.0 * residuals[0] * cotangents[0]]

  point = jnp.arange(3.0)
  gradient = jax.grad(lambda tokens: jnp.sum(square_with(kernel)(tokens)[0]))
  np.testing.assert_array_equal(gradient(point), 2.0 * point)
  assert [each is None for each in received[-1]] == [False, True]
  # Its derivative is that of the transposed function.
  _, tangent = jax.jvp(gradient, (point,), (point,))
  np.testing.assert_array_equal(tangent, 2.0 * point)


@pytest.mark.parametrize(
  "kernel", [None, lambda found, given: [2.0 * found[0] * given[0]]]
)
def test_a_result_that_is_not_used_under_shard_map(kernel):
  gradient = jax.grad(lambda tokens: jnp.sum(square_with(kernel)(tokens)[0]))

  def both(tokens):
    return jax.jvp(gradient, (tokens,), (tokens,))

  tokens = jnp.arange(8.0 * 3).reshape(8, 3)
  spec = PartitionSpec("rows")
  mesh = Mesh(np.array(jax.devices()), "rows")
  run = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)
  for each in jax.jit(run)(tokens):
    np.testing.assert_array_equal(each, 2.0 * tokens)
