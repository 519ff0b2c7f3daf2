"""Parameters of scores in the kernels for Hopper GPUs, and their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks, scores
from attention.implementations.pallas.hopper.tiles import parts
from tests.attention.implementations.pallas.hopper import (
  CASES,
  INTERPRETED,
  additive,
  arrays,
  check,
  close,
  concat,
  ignore_nan,
  results,
)
from tests.matrix import sampled


def of_heads(name, channels, heads=(2,)):
  """A score with all parameters that it can have, of one or of all heads."""
  matrix, vector = (*heads, 64, channels), (*heads, channels)
  make, shapes = {
    "general": (scores.general, [(*heads, 64, 64)]),
    "additive": (scores.additive, [matrix, matrix, vector, vector]),
    "concat": (scores.concat, [(*heads, 128, channels), vector]),
    "local-p": (
      lambda *weights: scores.local(scores.scaled_dot(), 40.0, *weights),
      [matrix, vector],
    ),
  }[name]
  return make(*(0.1 * each for each in arrays(*shapes, dtype=jnp.float32)))


@sampled("mask", [None, masks.causal(40)], default=[None])
@sampled("name", ["additive", "concat"], default=[])
def test_heads_with_parameters_of_their_own(name, mask):
  tokens = arrays((2, 2, 10, 64), (2, 1, 60, 64), (2, 2, 60, 64))
  options = {"score": of_heads(name, 8), "mask": mask}
  check(tokens, **options)


@pytest.mark.exhaustive
def test_a_number_of_one_head_in_the_map_of_a_token():
  tokens = arrays((1, 10, 64), (1, 20, 64), (1, 20, 64))
  check(tokens, score=scores.cosine(np.full(1, 5.0, np.float32)))


@ignore_nan
@sampled("mask", [None, masks.causal(40)], default=[masks.causal(40)])
@sampled("name", ["cosine", "normalised"], default=["cosine"])
def test_kernels_compute_norms_and_their_transposes(name, mask, launched):
  tokens = arrays((1, 2, 64, 64), (1, 1, 128, 64), (1, 2, 128, 64))
  if mask is not None:
    tokens[1] = tokens[1].at[:, :, 66, 3].set(jnp.inf)
  options = CASES[name] | {"mask": mask}
  check(tokens, **options)
  assert len(launched) == 4


def capped(score):
  """A score of a number that it uses twice."""
  return lambda number: scores.soft_cap(score(number), number)


@sampled("score", ["cosine", "temperature"], default=["cosine"])
def test_a_number_that_is_used_twice_has_both_gradients(score, launched):
  make = capped(
    {
      "cosine": scores.cosine,
      "temperature": lambda number: scores.temperature(scores.dot(), number),
    }[score]
  )

  def gradient(implementation):
    def loss(number, *tokens):
      context = attend(
        *tokens, score=make(number), implementation=implementation
      )
      return jnp.sum(jnp.sin(context.astype(jnp.float32)))

    # The number is one tracer in both places.
    tokens = arrays((64, 64), (64, 64), (64, 64))
    return jax.jit(jax.grad(loss))(jnp.float32(3.0), *tokens)

  got, want = gradient(INTERPRETED), gradient("reference")
  # None for the gradients of keys and values, and one for the scales of keys.
  assert len(launched) == {"cosine": 3, "temperature": 2}[score]
  np.testing.assert_allclose(got, want, rtol=0.02)


# The kernels of a gradient: three of attention, and one that sums the gradients
# of matrices or computes the scales of keys.
KERNELS = {
  "local-p": 4,
  "local-p of lengths": 4,
  "norms of local-p": 4,
  "general local-p": 4,
  "projected local-p": 4,
  "normalised local-p": 5,
  "cosine": 4,
  "normalised": 4,
  "general": 4,
  "general half": 4,
  "projected": 4,
  "projected half": 4,
  "Transformer-XL": 4,
  "forgetting": 6,  # three for the sums of gates, of which a check traces one
}


@ignore_nan
@sampled("heads", [(), (2,)], default=[(2,)])
@sampled("mask", [None, masks.causal(40)], default=[masks.causal(40)])
@sampled(
  "name", ["general", "additive", "concat", "local-p"], default=["general"]
)
def test_blocks_sum_the_gradients_of_parameters(
  name, heads, mask, launched, monkeypatch
):
  """Of one for all heads, or of one for each, in a block of several tiles."""
  monkeypatch.setattr(parts, "AT_ONCE", 8)  # 2 blocks for 3 tiles
  shared = (2, 1) if name == "general" else (2, 2)
  tokens = arrays((2, 2, 150, 64), (*shared, 64, 64), (2, 2, 64, 64))
  if mask is not None:
    tokens[0] = tokens[0].at[:, :, 3, 5].set(jnp.nan)
  options = {"score": of_heads(name, 64, heads), "mask": mask}
  check(tokens, **options)
  assert len(launched) == 4


@sampled("name", [*CASES], default=["additive", "projected", "forgetting"])
def test_the_number_of_kernels_of_a_gradient(name, launched):
  tokens = arrays((70, 64), (70, 64), (70, 64))
  jax.eval_shape(lambda: results(INTERPRETED, tokens, **CASES[name]))
  assert len(launched) == KERNELS.get(name, 3)


@pytest.mark.parametrize(
  ("place", "kernels"), [("query_weight", 3), ("key_weight", 4), ("bias", 3)]
)
def test_the_gradient_of_one_parameter(place, kernels, launched):
  """Which needs the kernel of keys if it is that of keys."""
  score = of_heads("additive", 64, heads=())
  tokens = arrays((10, 64), (100, 64), (100, 64))

  def gradient(implementation):
    def loss(parameter, *tokens):
      context = attend(
        *tokens,
        score=dataclasses.replace(score, **{place: parameter}),
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(context.astype(jnp.float32)))

    return jax.eval_shape(jax.grad(loss), getattr(score, place), *tokens)

  gradient(INTERPRETED)
  assert len(launched) == kernels


@pytest.mark.parametrize(
  ("tokens", "matrices", "kernels"),
  [
    (jnp.float16, jnp.float16, 4),
    (jnp.float16, jnp.bfloat16, 3),  # XLA projects: float16 has not its range
    (jnp.float16, jnp.float32, 3),
    (jnp.bfloat16, jnp.float16, 3),
  ],
)
def test_dtypes_of_projections(tokens, matrices, kernels, launched):
  given = arrays((64, 64), (64, 64), (64, 64), dtype=tokens)
  score = concat(matrices)
  jax.eval_shape(lambda: results(INTERPRETED, given, score=score))
  assert len(launched) == kernels


@sampled("sizes", [(64, 128, 64), (128, 64, 64)], default=[])
def test_projected_tokens_of_other_sizes(sizes, launched):
  query_size, key_size, size = sizes
  weights = arrays((query_size, 64), (key_size, 64), (64,), seed=1)
  score = scores.additive(*(0.2 * each for each in weights))
  shapes = (10, query_size), (60, key_size), (60, size)
  tokens = [0.7 * each for each in arrays(*shapes)]
  options = {"score": score, "mask": masks.causal(40)}
  check(tokens, **options)
  assert len(launched) == 4


def test_second_derivatives_of_projected_tokens():
  tokens = arrays((10, 64), (20, 64), (20, 64))

  def tangent(implementation):
    def loss(query):
      context = attend(
        query, *tokens[1:], score=additive(64), implementation=implementation
      )
      return jnp.sum(jnp.sin(context.astype(jnp.float32)))

    return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])(tokens[0])

  close(tangent(INTERPRETED), tangent("reference"))
