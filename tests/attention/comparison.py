"""Blockwise against the reference: what is compared, and how closely."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from attention import attend
from attention.implementations.blockwise import Blockwise
from tests.attention.oracle import CASES

SMALL = Blockwise(query_block=2, key_block=3, leading_block=2)
wide = functools.partial(jax.enable_x64, True)


def jitted(function):
  """Compiles the whole function; its eager operations would compile singly.

  All options except `rng` are constants when tracing, as in an eager call.
  """

  @functools.wraps(function)
  def run(*arrays, rng=None, **options):
    def program(rng, *arrays):
      drawn = {} if rng is None else {"rng": rng}
      return function(*arrays, **drawn, **options)

    return jax.jit(program)(rng, *arrays)

  return run


def equations(jaxpr, without=()):
  """All equations of a jaxpr, and of those inside of its operations.

  Except those inside of operations whose names are in `without`.
  """
  for equation in jaxpr.eqns:
    yield equation
    if equation.primitive.name not in without:
      for inner in jaxprs_in_params(equation.params):
        yield from equations(inner, without)


def products(jaxpr):
  """The precisions of all matrix products of a jaxpr."""
  for equation in equations(jaxpr):
    if equation.primitive.name == "dot_general":
      yield equation.params["precision"]


def close(got, want, rtol=1e-9, atol=1e-11):
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(
      *(np.asarray(each, np.float64) for each in (got, want)), rtol, atol
    ),
    got,
    want,
  )


def outcome(point, name, implementation, arguments=lambda bias: {}):
  """Context, lse and the gradients of everything in `point`."""

  def loss(point):
    context, lse = attend(
      *point["tokens"],
      score=CASES[name].bound(point["parameters"]),
      implementation=implementation,
      return_lse=True,
      **arguments(point.get("bias")),
    )
    seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(jnp.sin(context)) + jnp.sum(seen**2), (context, lse)

  return jax.jit(jax.grad(loss, has_aux=True))(point)
