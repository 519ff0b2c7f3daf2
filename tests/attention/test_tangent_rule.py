"""Functions with a rule for tangents, which `jax.custom_jvp` loses in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive

from attention.transforms.tangent_rule import instantiated, with_tangent_rule
from tests.attention.comparison import equations


def opaque(x, y):
  """sin(x) y, without derivatives, as a kernel."""
  bits = jax.lax.bitcast_convert_type(jnp.sin(x) * y, jnp.uint32)
  return {"product": jax.lax.bitcast_convert_type(bits, jnp.float32)}


def rule(primals, tangents):
  (x, y), (of_x, of_y) = primals, map(instantiated, tangents)
  moved = jnp.cos(x) * of_x * y + jnp.sin(x) * of_y
  return with_rule(x, y), {"product": moved}


def with_rule(x, y):
  return with_tangent_rule(opaque, rule, x, y)


X = jnp.linspace(0.1, 1.0, 5)
Y = jnp.linspace(2.0, 1.0, 5)


def product(x, y):
  return {"product": jnp.sin(x) * y}


def in_a_scan(function):
  def total(x, y):
    def added(total, x):
      return total + function(x, y)["product"].sum() ** 2, None

    return jax.lax.scan(added, 0.0, jnp.stack([x, 2.0 * x]))[0]

  return total


TRANSFORMED = {
  "value": lambda f: f,
  "vmap": lambda f: jax.vmap(f, (0, None)),
  "gradient of a scan": lambda f: jax.grad(in_a_scan(f)),
  "hessian of a scan": lambda f: jax.hessian(in_a_scan(f), (0, 1)),
  "third order of a scan": lambda f: jax.jacfwd(jax.hessian(in_a_scan(f))),
  "hessian of a map": lambda f: jax.hessian(
    lambda x, y: in_a_scan(jax.vmap(f, (0, None)))(x[:, None], y[:2]).sum()
  ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_derivatives_are_those_of_the_rule(name):
  functions = with_rule, product
  got, want = jax.jit(
    lambda x, y: [TRANSFORMED[name](each)(x, y) for each in functions]
  )(X, Y)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), got, want
  )


def test_the_value_outside_of_jit():
  got = with_rule(X, Y)["product"]
  np.testing.assert_allclose(got, np.sin(X) * np.asarray(Y), 1e-5)


def test_tangents_that_are_zero_are_symbolic():
  found = []

  def noting(primals, tangents):
    found.append([isinstance(each, SymbolicZero) for each in tangents])
    return rule(primals, tangents)

  def call(x, y):
    return with_tangent_rule(opaque, noting, x, y)

  jax.jvp(lambda x: call(x, Y), (X,), (X,))
  assert found == [[False, True]]


def test_jax_finds_the_operations_of_the_function():
  """Some, as cuDNN's kernel, need to know the devices of a program."""
  jaxpr = jax.make_jaxpr(jax.grad(in_a_scan(with_rule)))(X, Y).jaxpr
  names = {each.primitive.name for each in equations(jaxpr)}
  assert {"with_tangent_rule", "bitcast_convert_type"} <= names


def test_unused_operations_are_not_lowered():
  only_traced = Primitive("only_traced")
  only_traced.def_abstract_eval(lambda x: x)

  def function(x):
    only_traced.bind(x)
    return x + 1.0

  run = jax.jit(lambda x: with_tangent_rule(function, rule, x))
  assert run(jnp.float32(1.0)) == 2.0
