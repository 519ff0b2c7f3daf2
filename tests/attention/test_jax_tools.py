"""JAX's tools for debugging and transposing, applied to attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from attention import (
  attend,
  attention_weights,
  biases,
  masks,
  normalizers,
  scores,
)
from attention.implementations.blockwise import Blockwise
from tests.attention.comparison import close
from tests.attention.oracle import single
from tests.matrix import sampled, sampled_product

TILES = Blockwise(query_block=2, key_block=3)
every_implementation = pytest.mark.parametrize(
  "implementation", ["reference", TILES]
)
CALLS = {
  "causal": {"mask": masks.causal()},
  "nothing visible": {"mask": masks.padding(0)},
  "additive": {"score": scores.additive(jnp.eye(4), jnp.eye(4), jnp.ones(4))},
  "local": {"score": scores.local(scores.dot(), 2)},
  "sink": {"normalizer": normalizers.softmax(0.5), "mask": masks.causal()},
  "softpick": {"normalizer": normalizers.softpick(), "mask": masks.causal()},
  "entmax": {"normalizer": normalizers.entmax(), "mask": masks.causal()},
}
# By default: rows without keys, a function of each weight, a sort of each row.
HIDING = "nothing visible", "softpick", "entmax"
# Ids of 5 queries and of 7 keys, a mask and a bias.
ARRAYS = (
  np.array([0, 0, 1, 1, 2]),
  np.array([0, 0, 0, 1, 1, 1, 2]),
  np.arange(35).reshape(5, 7) % 3 > 0,
  np.linspace(-1.0, 1.0, 35, dtype=np.float32).reshape(5, 7),
)
# Options of `attend` as functions of these arrays.
TRANSPOSED = {
  "nothing": lambda *_: {},
  "softpick": lambda *_: {"normalizer": normalizers.softpick()},
  "padding": lambda ids, *_: {"mask": masks.padding(ids[-1] + 3)},
  "causal": lambda *_: {"mask": masks.causal()},
  "segments": lambda ids, key_ids, *_: {"mask": masks.segments(ids, key_ids)},
  "array": lambda _, __, mask, ___: {"mask": mask},
  "alibi": lambda *_: {"bias": biases.alibi(1)},
  "bias": lambda *arrays: {"bias": arrays[-1], "mask": masks.causal()},
  "dropout": lambda *_: {
    "mask": masks.causal(),
    "dropout_rate": 0.3,
    "rng": jax.random.key(0),
  },
  "masked softpick": lambda *arrays: {
    "mask": arrays[2],
    "normalizer": normalizers.softpick(),
  },
  "entmax": lambda *_: CALLS["entmax"],
  "sink": lambda *_: CALLS["sink"],
}


def tokens():
  return single(0, (5, 4), (7, 4), (7, 3))


def loss(name, implementation):
  def total(*tokens):
    options = {**CALLS[name], "implementation": implementation}
    return jnp.sum(attend(*tokens, **options))

  return total


@every_implementation
@sampled("name", CALLS, default=HIDING)
def test_infinity_is_no_error_where_pairs_are_hidden(name, implementation):
  with jax.debug_infs(True):
    jax.grad(loss(name, implementation), (0, 1, 2))(*tokens())
    attention_weights(*tokens()[:2], **CALLS[name])


@every_implementation
@sampled("name", CALLS, default=HIDING)
def test_checks_of_numbers_find_no_error(name, implementation):
  function = jax.value_and_grad(loss(name, implementation))
  checked = checkify.checkify(function, errors=checkify.float_checks)
  error, _ = jax.jit(checked)(*tokens())
  error.throw()


@every_implementation
def test_checks_of_numbers_find_nan_in_a_token(implementation):
  query, key, value = tokens()
  checked = checkify.checkify(
    lambda value: attend(query, key, value, implementation=implementation),
    errors=checkify.float_checks,
  )
  error, _ = jax.jit(checked)(value.at[1].set(jnp.nan))
  with pytest.raises(checkify.JaxRuntimeError, match="nan"):
    error.throw()


def skip_loops(implementation):
  if implementation != "reference" and jax.__version_info__ >= (0, 12):
    pytest.skip("JAX 0.12 transposes no loop within jax.custom_jvp")


@sampled_product(
  ("implementation", "name"),
  [("reference", TILES), TRANSPOSED],
  default=[
    *(("reference", name) for name in ("bias", "dropout", "masked softpick")),
    *((TILES, name) for name in ("padding", "entmax")),
  ],
)
def test_attention_is_transposed_in_the_value(implementation, name):
  skip_loops(implementation)
  query, key, value = (each[None] for each in tokens())
  cotangent = np.cos(np.arange(15, dtype=np.float32)).reshape(1, 5, 3)

  def context(value, arrays):
    options = TRANSPOSED[name](*arrays)
    return attend(query, key, value, implementation=implementation, **options)

  of_value = functools.partial(context, arrays=ARRAYS)
  compiled = functools.partial(jax.jit(context), arrays=ARRAYS)

  @jax.jit
  def run(value, cotangent):
    (expected,) = jax.vjp(of_value, value)[1](cotangent)
    functions = of_value, compiled
    return expected, *(
      jax.linear_transpose(each, value)(cotangent)[0] for each in functions
    )

  expected, *found = run(value, cotangent)
  for got in found:
    close(got, expected, 1e-5, 1e-6)


@every_implementation
def test_transposing_ignores_queries_that_attend_to_nan(implementation):
  skip_loops(implementation)
  query, key, value = tokens()
  key = key.at[3].set(jnp.nan)  # visible to queries 3 and 4
  cotangent = np.cos(np.arange(15, dtype=np.float32)).reshape(5, 3)

  def context(value):
    return attend(
      query, key, value, mask=masks.causal(), implementation=implementation
    )

  (got,) = jax.linear_transpose(context, value)(cotangent)  # outside of jit
  assert np.isfinite(got).all()
  pull = jax.jit(lambda value, cotangent: jax.vjp(context, value)[1](cotangent))
  close(got, pull(value, cotangent)[0], 1e-5, 1e-6)
