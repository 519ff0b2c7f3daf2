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
