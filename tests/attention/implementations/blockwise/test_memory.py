"""Memory grows with T + S: no array is as large as [T, S]."""

import math

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from attention import attend, biases, masks
from attention.implementations.blockwise import Blockwise
from tests.attention import positional_cases
from tests.attention.oracle import CASES, draw_parameters
from tests.matrix import sampled, sampled_product

TILES = Blockwise(query_block=128, key_block=128)
SMALL = Blockwise(query_block=100, key_block=50)
FEATURES, LENGTH = 8, 1000


def _manhattan(parameters):
  temperature = parameters["temperature"]

  def score(query, key):
    gap = query[..., :, None, :] - key[..., None, :, :]
    return -temperature * jnp.sum(jnp.abs(gap), axis=-1)

  return score


SCORES = {name: case.bound for name, case in CASES.items()}
SCORES["manhattan"] = _manhattan


def parameters_of(name):
  if name == "manhattan":
    return {"temperature": jnp.asarray(0.7)}
  return draw_parameters(CASES[name], FEATURES, dtype=jnp.float32)


def gradient(name, implementation, **arguments):
  """The value and the gradients of everything, as a function of arrays."""

  def loss(query, key, value, parameters):
    context, lse = attend(
      query,
      key,
      value,
      score=SCORES[name](parameters),
      implementation=implementation,
      return_lse=True,
      **arguments,
    )
    return jnp.sum(jnp.sin(context)) + jnp.sum(jnp.where(lse > -9e9, lse, 0.0))

  return jax.value_and_grad(loss, (0, 1, 2, 3))


def tokens(length):
  return [jax.ShapeDtypeStruct((length, FEATURES), jnp.float32)] * 3


def temporaries(name, length, implementation):
  function = jax.jit(gradient(name, implementation))
  lowered = function.lower(*tokens(length), parameters_of(name))
  return lowered.compile().memory_analysis().temp_size_in_bytes


@sampled("name", SCORES, default=["additive"])
def test_temporaries_of_the_gradient_grow_linearly(name):
  # Tokens need more memory than tiles, whose buffers are reused.
  small, large = (temporaries(name, n, TILES) for n in (8192, 16384))
  assert large <= 2.2 * small
  assert large < 4 * 16384**2 / 100


def test_temporaries_of_the_reference_grow_quadratically():
  # Shows that the test above can fail.
  assert temporaries("dot", 2048, "reference") > 4 * 2048**2


def largest(jaxpr):
  """The most entries that any array within a jaxpr has, and that array."""
  found = [(0, "")]
  if isinstance(jaxpr, ClosedJaxpr):  # in JAX 0.12 every jaxpr
    found += [(math.prod(jnp.shape(c)), "a constant") for c in jaxpr.consts]
    jaxpr = jaxpr.jaxpr
  for variable in (*jaxpr.invars, *jaxpr.constvars):
    found.append((math.prod(variable.aval.shape), str(variable.aval)))
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      shape = variable.aval.shape
      found.append((math.prod(shape), f"{equation.primitive} {variable.aval}"))
    for leaf in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr),
    ):
      if isinstance(leaf, Jaxpr | ClosedJaxpr):
        found.append(largest(leaf))
  return max(found)


IDS = jnp.arange(LENGTH) // 170
ROWS = jnp.arange(LENGTH) % 7
ARGUMENTS = {
  "nothing": {},
  "causal": {"mask": masks.causal()},
  "causal from an array": {"mask": masks.causal(jnp.asarray(3))},
  "window": {"mask": masks.sliding_window(99, 3)},
  "prefix": {"mask": masks.causal() | masks.prefix(333)},
  "segments": {"mask": masks.segments(IDS, IDS)},
  "unsorted segments": {"mask": ~masks.segments(ROWS, IDS)},
  "padding": {"mask": masks.padding(jnp.asarray(777))},
  "shifted": {"mask": masks.causal().shifted(-20)},
  "row of an array": {"mask": (IDS > 2)[None], "bias": jnp.ones((LENGTH, 1))},
  "alibi": {"bias": biases.alibi(1)},
  "relative": {"bias": biases.relative_position(jnp.ones((8, 1)))},
  "dropout": {"dropout_rate": 0.1, "rng": jax.random.key(0)},
}


@sampled_product(
  ("what", "name"),
  (ARGUMENTS, ["scaled_dot", "additive", "own"]),
  default=[
    *((what, "scaled_dot") for what in ARGUMENTS),
    *((what, "additive") for what in ("nothing", "alibi", "dropout")),
    *((what, "own") for what in ("nothing", "relative", "segments")),
  ],
)
def test_no_array_has_as_many_entries_as_there_are_pairs(what, name):
  heads = [
    jax.ShapeDtypeStruct((1, LENGTH, FEATURES), jnp.float32) for _ in range(3)
  ]
  function = gradient(name, SMALL, **ARGUMENTS[what])
  jaxpr = jax.make_jaxpr(function)(*heads, parameters_of(name))
  size, where = largest(jaxpr)
  # All channels of a tile at once would be the largest array.
  assert size <= max(100 * 50 * FEATURES, 2 * LENGTH * FEATURES), where


def test_no_array_of_pairs_under_vmap_and_second_derivatives():
  batch = [jax.ShapeDtypeStruct((2, LENGTH, FEATURES), jnp.float32)] * 3
  run = gradient("scaled_dot", SMALL, mask=masks.causal())

  def squared(*tokens):
    _, gradients = run(*tokens, {})
    return sum(jnp.sum(leaf**2) for leaf in gradients[:3])

  jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(squared, (0, 1, 2))))(*batch)
  size, where = largest(jaxpr)
  assert size < LENGTH**2 / 4, where


def test_largest_finds_the_scores_of_the_reference():
  for what in ("nothing", "causal", "dropout"):
    function = gradient("dot", "reference", **ARGUMENTS[what])
    jaxpr = jax.make_jaxpr(function)(*tokens(LENGTH), {})
    assert largest(jaxpr)[0] >= LENGTH**2


@sampled("name", positional_cases.CASES, default=["shaw", "disentangled"])
def test_scores_with_positions_make_no_array_of_all_pairs(name):
  parameters = positional_cases.draw_case(name)
  if name == "forgetting":
    parameters = {"log_gates": jnp.zeros(LENGTH)}
  parameters = positional_cases.as_arrays(parameters, jnp.float32)

  def loss(parameters, *tokens):
    score = positional_cases.CASES[name].bound(parameters)
    return attend(*tokens, score=score, implementation=SMALL).sum()

  features = positional_cases.FEATURES
  tokens = [jax.ShapeDtypeStruct((1, LENGTH, features), jnp.float32)] * 3
  jaxpr = jax.make_jaxpr(jax.grad(loss, range(4)))(parameters, *tokens)
  size, where = largest(jaxpr)
  # A tile has the products with 149 distances.
  assert size <= 4 * 100 * 150, where
