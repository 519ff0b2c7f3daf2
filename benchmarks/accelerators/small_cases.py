"""Small calls beside jax.nn's dense formula."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import attention
from attention import biases, masks
from benchmarks.accelerators.attention_cases import derived, on_one_device
from benchmarks.accelerators.cases import Case
from experiments.aot.targets import Target

HEADS, WINDOW = 8, 128
DTYPES = ("float32", "bfloat16")
LIBRARIES = ("ours", "jax_nn")


class Sizes(NamedTuple):
  """The sizes of a call."""

  batch: int
  heads: int
  length: int  # of queries
  key_length: int
  features: int


SIZES = {
  "512": Sizes(2, 8, 512, 512, 64),
  "1024": Sizes(2, 8, 1024, 1024, 64),
  "odd": Sizes(2, 8, 513, 513, 64),
  "short": Sizes(128, 4, 32, 32, 32),
  "decode": Sizes(2, 8, 1, 2048, 64),
}
# Keyword arguments of `attend`, for arrays that are traced.
OURS: dict[str, Callable[..., dict[str, Any]]] = {
  "none": lambda lengths, visible: {},
  "causal": lambda lengths, visible: {"mask": masks.causal()},
  "padding": lambda lengths, visible: {"mask": masks.padding(lengths)},
  "window": lambda lengths, visible: {"mask": masks.sliding_window(WINDOW, 0)},
  "alibi": lambda lengths, visible: {"bias": biases.alibi(HEADS)},
  "array": lambda lengths, visible: {"mask": visible},
  "causal-padding": lambda lengths, visible: {
    "mask": masks.causal() & masks.padding(lengths)
  },
}
# The same of `jax.nn.dot_product_attention`.
JAX_NN: dict[str, Callable[..., dict[str, Any]]] = {
  "none": lambda lengths, visible: {},
  "causal": lambda lengths, visible: {"is_causal": True},
  "padding": lambda lengths, visible: {"key_value_seq_lengths": lengths},
  "window": lambda lengths, visible: {"local_window_size": (WINDOW, 0)},
  "alibi": lambda lengths, visible: {"bias": _alibi(visible.shape[-1])},
  "array": lambda lengths, visible: {"mask": visible[None, None]},
  "causal-padding": lambda lengths, visible: {
    "is_causal": True,
    "key_value_seq_lengths": lengths,
  },
}
_PLAIN = ("none", "causal", "padding", "window", "alibi", "array")
# The family, sizes, masks or biases, and derivatives; `lse` returns it too.
CALLS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
  ("dense", "512", _PLAIN, ("forward", "gradient")),
  ("dense", "1024", _PLAIN, ("forward", "gradient")),
  ("small", "512", _PLAIN, ("jvp", "forward-lse", "gradient-lse")),
  ("small", "512", ("causal-padding",), ("forward", "gradient")),
  ("small", "odd", _PLAIN, ("forward", "gradient")),
  ("small", "short", ("none", "causal", "padding"), ("forward", "gradient")),
  ("small", "decode", ("none", "padding", "array"), ("forward",)),
)


def cases() -> Iterator[Case]:
  """One case for each dtype, call and library."""
  for dtype, library in itertools.product(DTYPES, LIBRARIES):
    for family, sizes, patterns, derivatives in CALLS:
      for pattern, derivative in itertools.product(patterns, derivatives):
        yield Case(
          f"{family}/{dtype}/{pattern}/{sizes}/{derivative}/{library}",
          functools.partial(
            _make, dtype, pattern, SIZES[sizes], derivative, library
          ),
          (family, sizes) == ("dense", "512"),
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
  sizes: Sizes,
  derivative: str,
  library: str,
  target: Target,
):
  spec = functools.partial(jax.ShapeDtypeStruct, sharding=on_one_device(target))
  derivative, _, with_lse = derivative.partition("-")
  attend: Callable[..., Any] = _ours
  query, key = (
    (sizes.batch, sizes.heads, length, sizes.features)
    for length in (sizes.length, sizes.key_length)
  )
  if library == "jax_nn":
    attend = _jax_nn_with_lse if with_lse else _jax_nn
    query, key = ((b, t, h, d) for b, h, t, d in (query, key))
  return derived(
    functools.partial(attend, pattern, bool(with_lse)),
    derivative,
    3,
    spec(query, jnp.dtype(dtype)),
    *[spec(key, jnp.dtype(dtype))] * 2,
    spec((sizes.batch,), jnp.int32),
    spec((sizes.length, sizes.key_length), jnp.bool_),
  )


def _ours(pattern, with_lse, query, key, value, lengths, visible):
  return attention.attend(
    query,
    key,
    value,
    return_lse=with_lse,
    **OURS[pattern](lengths, visible),
  )


def _jax_nn(pattern, with_lse, query, key, value, lengths, visible):
  # Tokens are [B, T, H, D].
  del with_lse
  return jax.nn.dot_product_attention(
    *(query, key, value),
    implementation="xla",
    **JAX_NN[pattern](lengths, visible),
  )


def _jax_nn_with_lse(pattern, with_lse, query, key, value, lengths, visible):
  """jax.nn's formula with the lse, which has no derivatives in jax.nn."""
  del with_lse
  scores = jnp.einsum(
    "btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32
  )
  scores = scores * query.shape[-1] ** -0.5
  bias = JAX_NN[pattern](lengths, visible).get("bias")
  scores = scores if bias is None else scores + bias
  mask = OURS[pattern](lengths, visible).get("mask")
  if mask is not None:
    shown = masks.as_mask(mask).materialize(*scores.shape[-2:])
    shown = shown.reshape(-1, 1, *shown.shape[-2:])
    scores = jnp.where(shown, scores, 0.7 * jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(key.dtype)
  lse = jax.nn.logsumexp(scores, axis=-1)
  return jnp.einsum("bnts,bsnh->btnh", weights, value), lse
