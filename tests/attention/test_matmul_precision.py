"""`precision=` reaches every matrix product, also those of derivatives."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxpr_as_fun

import attention
from attention import attend, attention_weights, masks, normalizers, scores
from attention.arrays.matmul import matmul_precision
from attention.implementations.blockwise import Blockwise
from attention.modules import Attention, MultiHeadAttention
from tests.attention.comparison import products
from tests.attention.oracle import single
from tests.matrix import sampled

TILES = Blockwise(query_block=4, key_block=4)
HIGH, HIGHEST = (
  (precision,) * 2
  for precision in (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST)
)
D = 8


def tokens():
  return single(0, (2, 5, D), (2, 7, D), (2, 7, D))


WEIGHT, TABLE, VECTOR = single(0, (D, D), (2 * D + 1, D), (D,))
SCORES = {
  "dot": scores.dot(),
  "general": scores.general(WEIGHT),
  "cosine": scores.cosine(),
  "function": lambda query, key: query @ key.mT,
  "additive": scores.additive(WEIGHT, WEIGHT, VECTOR),
  "local_p": scores.local(scores.dot(), 2, WEIGHT, VECTOR),
  "shaw": scores.shaw(TABLE),
  "transformer_xl": scores.transformer_xl(WEIGHT, VECTOR, VECTOR),
  "location": scores.location(TABLE),
  "disentangled": scores.disentangled(TABLE[1:], TABLE[1:]),
}
CALLS = {
  f"{name}-{where}": functools.partial(
    attend, score=score, implementation=implementation
  )
  for name, score in SCORES.items()
  for where, implementation in (("reference", "reference"), ("tiles", TILES))
}


def heads(query, key, value, **options):
  return attention.multi_head_attention(
    query, key, value, *[WEIGHT.reshape(D, 2, 4)] * 3, WEIGHT.reshape(2, 4, D),
    rotary=True, **options,
  )  # fmt: skip


def module(layer, query, key, value, *, precision):
  layer = layer(precision=precision)
  return layer.init_with_output(jax.random.key(0), query, key, value)[0]


CALLS |= {
  "entmax": functools.partial(
    attend, normalizer=normalizers.entmax(), implementation=TILES
  ),
  "weights": lambda query, key, value, **options: attention_weights(
    query, key, **options
  ),
  "heads": heads,
  "MultiHeadAttention": functools.partial(
    module, functools.partial(MultiHeadAttention, 2)
  ),
  "Attention": functools.partial(
    module, functools.partial(Attention, "general")
  ),
}
FUNCTIONS = {
  "dot_score": (),
  "scaled_dot_score": (),
  "general_score": (WEIGHT,),
  "additive_score": (WEIGHT, WEIGHT, VECTOR),
  "concat_score": (jnp.concatenate([WEIGHT] * 2), VECTOR),
  "cosine_score": (),
}
CALLS |= {
  name: lambda query, key, value, name=name, parameters=parameters, **options: (
    getattr(attention, name)(query, key, *parameters, **options)
  )
  for name, parameters in FUNCTIONS.items()
}


def derivatives(call):
  """Its value, gradient and tangent, differentiated after it is traced."""
  compiled = jax.jit(call)

  def run(*tokens):
    gradient = jax.grad(lambda *tokens: jnp.sum(compiled(*tokens)), (0, 1, 2))
    return (compiled(*tokens), *jax.jvp(gradient, tokens, tokens))

  return run


# Tiles compute the products of all scores; the reference calls the same ones.
@sampled(
  "name",
  CALLS,
  default=[
    name
    for name in CALLS
    if not name.endswith("-reference") or name.startswith(("dot", "function"))
  ],
)
def test_precision_reaches_all_products_and_their_derivatives(name):
  call = functools.partial(CALLS[name], precision="high")
  closed = jax.make_jaxpr(derivatives(call))(*tokens())
  found = set(products(closed.jaxpr))
  # Sums of the additive score and positions of local-p are float32 whatever the
  # precision.
  own = {"additive", "concat", "local"} & {name.split("-")[0].split("_")[0]}
  assert found - ({HIGHEST} if own else set()) == {HIGH}


@pytest.mark.parametrize("name", ["dot", "general", "function", "location"])
def test_precision_reaches_the_products_that_are_traced_at_lowering(name):
  """With a mask, some operations are primitives that JAX lowers later."""
  call = functools.partial(
    CALLS[f"{name}-reference"], mask=masks.causal(), precision="high"
  )
  lowered = jax.jit(derivatives(call)).lower(*tokens()).as_text()
  found = re.findall(r"dot_general.*", lowered)
  assert found
  assert all("precision = [HIGH, HIGH]" in each for each in found)


@pytest.mark.parametrize("name", [None, "high"])
def test_derivatives_have_the_default_precision_of_the_call(name):
  with jax.default_matmul_precision(name):
    traced = jax.make_jaxpr(functools.partial(attend, implementation=TILES))(
      *tokens()
    )
  gradient = jax.grad(lambda *tokens: jnp.sum(jaxpr_as_fun(traced)(*tokens)[0]))
  closed = jax.make_jaxpr(gradient)(*tokens())
  assert set(products(closed.jaxpr)) == {HIGH if name else None}


@pytest.mark.parametrize(
  "precision",
  [
    jax.lax.Precision.HIGH,
    "high",
    ("high", "high"),
    (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH),
  ],
)
def test_all_forms_of_a_precision(precision):
  call = functools.partial(attend, precision=precision)
  closed = jax.make_jaxpr(call)(*tokens())
  assert set(products(closed.jaxpr)) == {HIGH}


def test_an_algorithm_as_the_precision():
  algorithm = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
  for precision in (algorithm, algorithm.name):
    with matmul_precision(precision):
      closed = jax.make_jaxpr(attend)(*tokens())
    assert set(products(closed.jaxpr)) == {algorithm}


@pytest.mark.parametrize("precision", ["best", 3, ("high", "highest")])
def test_other_precisions_are_refused(precision):
  with pytest.raises(ValueError, match="precision must be None"):
    attend(*tokens(), precision=precision)
