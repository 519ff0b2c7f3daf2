"""Dropout in the kernels for Hopper GPUs."""

import functools

import jax
import jax.numpy as jnp

from attention import attend, masks, normalizers, scores
from attention.implementations.pallas.hopper.block import memory
from tests.attention.implementations.pallas import hopper
from tests.attention.implementations.pallas.hopper import (
  INTERPRETED,
  additive,
  arrays,
  close,
  general,
  ignore_nan,
  predicting,
  rows_of_nan,
)
from tests.matrix import sampled

SHAPES = (2, 70, 64), (2, 100, 64), (2, 100, 64)
CASES = {
  "scaled dot": {},
  "causal": {"mask": masks.causal(40)},
  "additive": {"score": additive()},
  "general local-p": {"score": predicting(general()), "mask": masks.causal(40)},
  "softpick": {"normalizer": normalizers.softpick()},
  "soft cap": {"score": scores.soft_cap(scores.scaled_dot(), 5.0)},
}


def check(tokens, rate=0.3, **options):
  options |= {"dropout_rate": rate, "rng": jax.random.key(3)}
  return hopper.check(tokens, hopper.pulled_back, **options)


# A test of factors in memory, below, is causal.
@sampled("name", [*CASES], default=[])
def test_the_same_weights_are_dropped_as_in_the_reference(name):
  check(arrays(*SHAPES), **CASES[name])


@sampled("rate", [0.9, 1.0], default=[])
def test_rates(rate):
  check(arrays(*SHAPES), rate=rate)


@ignore_nan
@sampled("token", ["query", "key", "value"], default=[])
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(token):
  options = {"check": check, "mask": masks.causal(40)}
  assert 0 < rows_of_nan(arrays(*SHAPES), token, **options) < 70


@sampled("are_kept", [True, False], default=[True])
def test_a_block_without_memory_for_the_factors_computes_them_again(
  are_kept, monkeypatch
):
  fits, of_block, kept = memory.fits, memory.of_block, set()

  def noted(problem, kernel):
    held = of_block(problem, kernel)
    if held.dropout_factors is not None:
      kept.add((kernel.own, kernel.of_gradients))
    return held

  def limited(held):
    return fits(held) and (are_kept or held.dropout_factors is None)

  monkeypatch.setattr(memory, "fits", limited)
  monkeypatch.setattr(memory, "of_block", noted)
  check(arrays(*SHAPES), **CASES["causal"])
  # Those of queries and of the forward kernel read the factors once.
  assert kept == ({("key", True)} if are_kept else set())


@sampled("keys", [(2, 1), (1, 3)], default=[])
def test_heads_that_share_keys(keys):
  check(arrays((2, 3, 70, 64), (*keys, 100, 64), (*keys, 100, 64)))


def test_forward_mode_drops_the_same_weights():
  tokens = arrays((64, 64), (64, 64), (64, 64))

  @functools.partial(jax.jit, static_argnums=0)
  def tangent(implementation, *tokens):
    def of_query(query):
      context = attend(
        query,
        *tokens[1:],
        dropout_rate=0.3,
        rng=jax.random.key(3),
        implementation=implementation,
        mask=masks.causal(40),
      )
      return context.astype(jnp.float32)

    return jax.jvp(of_query, tokens[:1], tokens[:1])[1]

  close(tangent(INTERPRETED, *tokens), tangent("reference", *tokens))
