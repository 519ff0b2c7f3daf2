"""Kernels for Hopper GPUs, interpreted, with other numbers of features."""

import jax.numpy as jnp

from attention import masks, normalizers, scores
from tests.attention.implementations.pallas.hopper import (
  arrays,
  check,
  ignore_nan,
  pulled_back,
  rows_of_nan,
)
from tests.matrix import sampled

CAUSAL = {"mask": masks.causal(40)}


def additive(features):
  shapes = (features, 8), (features, 8), (8,)
  weights = arrays(*shapes, seed=1, dtype=jnp.float32)
  return scores.additive(*(0.3 * each for each in weights))


def general(features):
  (weight,) = arrays((features, features), seed=2, dtype=jnp.float32)
  return scores.soft_cap(scores.general(0.1 * weight), 5.0)


def tables(number, features):
  return arrays(*[(20, features)] * number, seed=3, dtype=jnp.float32)


# Options for so many features of queries and keys.
CASES = {
  "dot": lambda features: CAUSAL,
  "general": lambda features: {"score": general(features)},
  "cosine": lambda features: {"score": scores.cosine(jnp.float32(5.0))},
  "additive": lambda features: {"score": additive(features)},
  "relative": lambda features: {
    "score": scores.disentangled(*tables(2, features)),
    **CAUSAL,
  },
}


# Of queries and keys, and of values.
@sampled(
  "features", [(32, 32), (16, 128), (80, 48), (96, 96)], default=[(80, 48)]
)
@sampled("name", [*CASES], default=["relative"])
@ignore_nan
def test_features_that_are_a_multiple_of_16(name, features):
  size, of_values = features
  tokens = arrays((50, size), (100, size), (100, of_values))
  options = CASES[name](size)
  if "mask" in options:  # a block cleans its tokens, 64 features at a time
    tokens[2] = tokens[2].at[66, of_values - 8].set(jnp.nan)
    tokens[1] = tokens[1].at[80, size - 8].set(jnp.nan)
  check(tokens, **options)


@sampled("features", [(32, 32), (80, 48)], default=[])
def test_entmax(features):
  size, of_values = features
  tokens = arrays((50, size), (100, size), (100, of_values))
  check(tokens, pulled_back, normalizer=normalizers.entmax(), **CAUSAL)


@ignore_nan
@sampled("token", ["query", "key", "value"], default=[])
def test_nan_in_tokens_of_96_features(token):
  """Which a block cleans 64 and 32 features at a time."""
  tokens = arrays((70, 96), (100, 96), (100, 96))
  assert rows_of_nan(tokens, token, feature=80, mask=masks.causal(30)) > 0
