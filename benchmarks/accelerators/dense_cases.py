"""Attention beside jax.nn's dense formula, in sizes where that is small."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import attention
from attention import biases, masks
from benchmarks.accelerators.attention_cases import derived, on_one_device
from benchmarks.accelerators.cases import Case
from experiments.aot.targets import Target

BATCH, HEADS, FEATURES, WINDOW = 2, 8, 64, 128
LENGTHS = (512, 1024)
DTYPES = ("float32", "bfloat16")
DERIVATIVES = ("forward", "gradient")
LIBRARIES = ("ours", "jax_nn")

# Keyword arguments of `attend`, for arrays that are traced.
OURS: dict[str, Callable[..., dict[str, Any]]] = {
  "none": lambda lengths, visible: {},
  "causal": lambda lengths, visible: {"mask": masks.causal()},
  "padding": lambda lengths, visible: {"mask": masks.padding(lengths)},
  "window": lambda lengths, visible: {"mask": masks.sliding_window(WINDOW, 0)},
  "alibi": lambda lengths, visible: {"bias": biases.alibi(HEADS)},
  "array": lambda lengths, visible: {"mask": visible},
}
# The same of `jax.nn.dot_product_attention`.
JAX_NN: dict[str, Callable[..., dict[str, Any]]] = {
  "none": lambda lengths, visible: {},
  "causal": lambda lengths, visible: {"is_causal": True},
  "padding": lambda lengths, visible: {"key_value_seq_lengths": lengths},
  "window": lambda lengths, visible: {"local_window_size": (WINDOW, 0)},
  "alibi": lambda lengths, visible: {"bias": _alibi(visible.shape[-1])},
  "array": lambda lengths, visible: {"mask": visible[None, None]},
}


def cases() -> Iterator[Case]:
  """One case for each dtype, mask or bias, length, derivative and library."""
  for dtype, pattern, length, derivative, library in itertools.product(
    DTYPES, OURS, LENGTHS, DERIVATIVES, LIBRARIES
  ):
    yield Case(
      f"dense/{dtype}/{pattern}/{length}/{derivative}/{library}",
      functools.partial(_make, dtype, pattern, length, derivative, library),
      length == LENGTHS[0],
    )


def _alibi(length: int) -> jax.Array:
  """ALiBi's bias [1, H, T, S], from numbers that the program computes."""
  positions = jax.lax.iota(jnp.float32, length)
  slopes = 2.0 ** (-8.0 * (jax.lax.iota(jnp.float32, HEADS) + 1) / HEADS)
  distances = jnp.abs(positions[:, None] - positions)
  return -slopes[None, :, None, None] * distances


def _make(
  dtype: str,
  pattern: str,
  length: int,
  derivative: str,
  library: str,
  target: Target,
):
  spec = functools.partial(jax.ShapeDtypeStruct, sharding=on_one_device(target))
  attend = {"ours": _ours, "jax_nn": _jax_nn}[library]
  sizes = (HEADS, length) if library == "ours" else (length, HEADS)
  tokens = spec((BATCH, *sizes, FEATURES), jnp.dtype(dtype))
  return (
    derived(functools.partial(attend, pattern), derivative, 3),
    (
      *(tokens, tokens, tokens),
      spec((BATCH,), jnp.int32),
      spec((length, length), jnp.bool_),
    ),
  )


def _ours(pattern, query, key, value, lengths, visible):
  return attention.attend(query, key, value, **OURS[pattern](lengths, visible))


def _jax_nn(pattern, query, key, value, lengths, visible):
  # Tokens are [B, T, H, D].
  return jax.nn.dot_product_attention(
    *(query, key, value),
    implementation="xla",
    **JAX_NN[pattern](lengths, visible),
  )
