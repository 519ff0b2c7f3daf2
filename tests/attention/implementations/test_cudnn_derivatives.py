"""Derivatives of the cuDNN implementation, of every mode and of the lse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks, normalizers
from attention.implementations.reference import size
from tests.attention.implementations.cudnn_stand_in import (
  PATTERNS,
  SHAPES,
  tokens,
)
from tests.attention.oracle import draw
from tests.matrix import sampled, sampled_product

pytestmark = pytest.mark.usefixtures("_stand_in")


def of_both(function, *arrays):
  """What a function of arrays returns with cuDNN and with the reference."""
  results = jax.jit(
    lambda *arrays: [function(*arrays, x) for x in ("cudnn", "reference")]
  )(*arrays)
  return [[np.asarray(x, "f4") for x in jax.tree.leaves(y)] for y in results]


@pytest.mark.parametrize("is_small", [True, False])
def test_the_lse_and_its_gradient_equal_the_reference(is_small, monkeypatch):
  if not is_small:
    monkeypatch.setattr(size, "_BYTES", 0)
  query, key, value = tokens(*SHAPES)

  def lse(query, implementation):
    return attend(
      *(query, key, value),
      mask=masks.padding(jnp.array([0, 5])),
      implementation=implementation,
      return_lse=True,
    )[1]

  def total(query, implementation):
    result = lse(query, implementation)
    return result[1].sum(), result

  gradient = jax.grad(total, has_aux=True)
  for got, want in zip(*of_both(gradient, query)):
    np.testing.assert_allclose(got, want, atol=0.03)


def test_a_small_call_with_an_lse_is_differentiated_as_the_dense_formula():
  query, key, value = tokens(*SHAPES)
  bias = jnp.asarray(draw(7, (3, 6, 8))[0], jnp.bfloat16)

  def loss(query, bias, implementation):
    context, lse = attend(
      *(query, key, value),
      bias=bias,
      implementation=implementation,
      return_lse=True,
    )
    return context.astype("f4").sum() + lse.sum()

  gradient = jax.grad(loss, (0, 1))
  for got, want in zip(*of_both(gradient, query, bias)):
    np.testing.assert_array_equal(got, want)


def agree_in_norm(got, want):
  for mine, right in zip(got, want, strict=True):
    mine, right = (np.asarray(each, "f4") for each in (mine, right))
    error = np.linalg.norm(mine - right) / np.linalg.norm(right)
    assert error < 0.05, error


def in_a_loop(loss):
  def total(*tokens):
    tokens = [each[None] for each in tokens]
    return jax.lax.map(lambda each: loss(*each), tokens).sum()

  return total


@sampled("name", ["lse", "sink"], default=["lse"])
def test_second_derivatives_of_the_lse(name, monkeypatch):
  """Also in a loop."""
  monkeypatch.setattr(size, "_BYTES", 0)  # else those of the dense formula

  def loss(implementation, *tokens):
    options = {"mask": masks.causal(2), "implementation": implementation}
    if name == "sink":
      sink = jnp.mean(tokens[0].astype("f4"))
      options["normalizer"] = normalizers.softmax(sink)
      return jnp.sum(jnp.sin(attend(*tokens, **options).astype("f4")))
    return jnp.sum(jnp.sin(3 * attend(*tokens, **options, return_lse=True)[1]))

  @jax.jit
  def products(*tokens):
    of_cudnn, of_reference = (
      functools.partial(loss, each) for each in ("cudnn", "reference")
    )
    return [
      jax.jvp(jax.grad(function, (0, 1)), tokens, tokens)[1]
      for function in (of_cudnn, in_a_loop(of_cudnn), of_reference)
    ]

  *found, want = products(*tokens(*SHAPES))
  for got in found:
    agree_in_norm(got, want)


DERIVATIVES = {
  "jvp": lambda loss, tokens: jax.jvp(loss, tokens, tokens)[1],
  "hessian-vector product": lambda loss, tokens: jax.jvp(
    jax.grad(loss, (0, 1, 2)), tokens, tokens
  )[1],
  "hessian-vector product of a loop": lambda loss, tokens: jax.jvp(
    jax.grad(in_a_loop(loss), (0, 1, 2)), tokens, tokens
  )[1],
  "reverse over reverse": lambda loss, tokens: jax.grad(
    lambda *tokens: sum(
      jnp.vdot(one, other).astype("f4")
      for one, other in zip(jax.grad(loss, (0, 1, 2))(*tokens), tokens)
    ),
    (0, 1, 2),
  )(*tokens),
  "jacfwd": lambda loss, tokens: jax.jacfwd(loss)(*tokens),
  "vmap of a gradient": lambda loss, tokens: jax.vmap(jax.grad(loss, (0, 2)))(
    *(each[:, None] for each in tokens)
  ),
}
BIASED = {
  "none": {},
  "lengths": {"mask": PATTERNS["padding and causal"]},
  "window": {"mask": PATTERNS["window"]},
  "heads": {"mask": PATTERNS["heads"]},
  "bias": {"bias": jnp.asarray(draw(7, (3, 6, 8))[0], jnp.bfloat16)},
}


@sampled_product(
  ("derivative", "arguments"),
  (DERIVATIVES, BIASED),
  default=[
    ("jvp", "lengths"),
    ("hessian-vector product of a loop", "lengths"),
    ("vmap of a gradient", "bias"),
  ],
)
def test_all_derivatives_equal_the_reference(derivative, arguments):
  if "vmap" in derivative and arguments == "lengths":
    pytest.skip("one example has no batch of lengths")
  weights = jnp.cos(jnp.arange(8.0))

  def loss(implementation, *tokens):
    context = attend(
      *tokens, **BIASED[arguments], implementation=implementation
    )
    return jnp.sum(jnp.sin(context.astype("f4")) @ weights)

  # Tokens that are constants of the program would have wrong batches of
  # tangents: https://github.com/jax-ml/jax/issues/39103.
  @jax.jit
  def derivatives(tokens):
    without_loop = derivative.removesuffix(" of a loop")  # the same numbers
    names = {"cudnn": derivative, "reference": without_loop}
    return [
      jax.tree.leaves(DERIVATIVES[each](functools.partial(loss, name), tokens))
      for name, each in names.items()
    ]

  agree_in_norm(*derivatives(tuple(tokens(*SHAPES))))


def test_the_gradient_of_a_bias_equals_the_reference():
  bias = jnp.asarray(draw(7, (3, 6, 8))[0], jnp.bfloat16)

  def gradient(bias, implementation):
    def loss(bias):
      context = attend(
        *tokens(*SHAPES), bias=bias, implementation=implementation
      )
      return jnp.sum(jnp.sin(context.astype("f4")))

    return jax.grad(loss)(bias)

  agree_in_norm(*of_both(gradient, bias))
