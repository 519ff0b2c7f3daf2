"""Second derivatives in `jax.lax.map`, where JAX drops a `custom_jvp`."""

import functools

import jax
import jax.numpy as jnp

from attention import attend, masks, normalizers, scores
from attention.implementations import Pallas
from attention.implementations.blockwise import Blockwise
from tests.attention.comparison import close
from tests.attention.oracle import single
from tests.matrix import sampled_product

MATRIX, VECTOR = jnp.sin(jnp.arange(16.0)).reshape(4, 4), jnp.arange(4.0)
# Options of `attend` as functions of a number for each key.
CALLS = {
  "bias": lambda numbers: {"bias": numbers},
  "ties": lambda numbers: {"bias": 0.0 * numbers, "mask": masks.causal(1)},
  "sink": lambda numbers: {
    "bias": numbers,
    "normalizer": normalizers.softmax(numbers[0]),
  },
  "forgetting": lambda numbers: {
    "score": scores.forgetting(scores.dot(), -jnp.abs(numbers)),
    "mask": masks.causal(1),
  },
  "cosine": lambda numbers: {"score": scores.cosine(numbers[0])},
  "additive": lambda numbers: {
    "score": scores.additive(MATRIX, MATRIX, VECTOR),
    "bias": numbers,
  },
  "local-p": lambda numbers: {
    "score": scores.local(scores.dot(), 4.0, MATRIX, VECTOR),
    "bias": numbers,
  },
  "shaw": lambda numbers: {
    "score": scores.shaw(jnp.outer(numbers[:5], MATRIX[0]))
  },
  **{
    name: lambda numbers, name=name: {
      "bias": numbers,
      "mask": masks.causal(1),
      "normalizer": getattr(normalizers, name)(),
    }
    for name in ("sigmoid", "softpick", "signed_softmax", "entmax", "sparsemax")
  },
}
KERNELS = Pallas(interpret=True)
TILES = Blockwise(query_block=2, key_block=3)


def product(name, implementation, in_loop):
  """A Hessian-vector product of everything, inside of `lax.map` or not."""

  def one(query, key, value, numbers):
    context = attend(
      *(query, key, value),
      **CALLS[name](numbers),
      implementation=implementation,
    )
    return jnp.sum(jnp.sin(context))

  def looped(*arrays):
    arrays = [each[None] for each in arrays]
    return jnp.sum(jax.lax.map(lambda each: one(*each), arrays))

  gradient = jax.grad(looped if in_loop else one, (0, 1, 2, 3))
  shapes = (6, 4), (7, 4), (7, 3), (7,)
  query, *others = single(0, *shapes)
  if name == "ties":
    query = 0.0 * query  # all scores of a row are equal
  arrays, tangents = (query, *others), tuple(single(1, *shapes))
  return jax.jit(lambda *x: jax.jvp(gradient, x, tangents)[1])(*arrays)


@functools.cache
def without_loop(name):
  return product(name, "reference", in_loop=False)


@sampled_product(
  ("name", "implementation"),
  (CALLS, ["reference", TILES, KERNELS]),
  default=[
    *(("forgetting", each) for each in ("reference", TILES, KERNELS)),
    *(("cosine", each) for each in ("reference", TILES)),
    ("ties", "reference"),
  ],
)
def test_hessian_vector_products_are_those_without_a_loop(name, implementation):
  got = product(name, implementation, in_loop=True)
  close(got, without_loop(name), 1e-4, 1e-4)


def test_tokens_of_zeros_and_hidden_nan_have_finite_second_derivatives():
  """By reverse mode twice; cosine scores of zeros have a derivative of 0."""
  query, key, value, *tangents = single(2, *[(4, 3)] * 6)
  key = key.at[3].set(0.0)
  mask = masks.causal(-1)  # hides the last key

  def second(score, key, value, in_loop):
    def one(*tokens):
      return jnp.sum(jnp.sin(attend(*tokens, score=score, mask=mask)))

    def looped(*tokens):
      tokens = [each[None] for each in tokens]
      return jnp.sum(jax.lax.map(lambda each: one(*each), tokens))

    def along(*tokens):
      gradient = jax.grad(looped if in_loop else one, (0, 1, 2))(*tokens)
      return sum(jnp.vdot(*each) for each in zip(gradient, tangents))

    return jax.jit(jax.grad(along, (0, 1, 2)))(query, key, value)

  for score in (scores.scaled_dot(), scores.cosine()):
    want = second(score, key, value, in_loop=False)
    hidden = [each.at[3].set(jnp.nan) for each in (key, value)]
    for tokens in ((key, value), hidden):
      close(second(score, *tokens, in_loop=True), want, 1e-4, 1e-4)
