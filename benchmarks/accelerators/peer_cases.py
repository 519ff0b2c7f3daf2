"""Attention of other libraries, in the shapes of `attention_cases`."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.accelerators.attention_cases import (
  BATCH,
  FEATURES,
  HEADS,
  LENGTH,
  derived,
  on_one_device,
)
from benchmarks.accelerators.cases import Case
from experiments.aot.targets import Target


def cases() -> Iterator[Case]:
  """jax.nn's formula in XLA, and the splash kernels for TPUs."""
  for name, attend in {"jax_nn": _jax_nn, "splash": _splash}.items():
    for causal in (False, True):
      for derivative in ("forward", "gradient"):
        yield Case(
          f"peers/{name}/{'causal' if causal else 'none'}/{derivative}",
          functools.partial(_make, attend, causal, derivative),
          default=True,
          for_tpus=attend is _splash,
        )


def _jax_nn(causal: bool, target: Target):
  del target
  order = functools.partial(jnp.swapaxes, axis1=1, axis2=2)

  def attend(*tokens):
    context = jax.nn.dot_product_attention(
      *map(order, tokens), is_causal=causal, implementation="xla"
    )
    return order(context)

  return attend


def _splash(causal: bool, target: Target):
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  del target
  mask = splash.CausalMask if causal else splash.FullMask
  masks = splash.MultiHeadMask([mask((LENGTH, LENGTH))] * HEADS)
  kernel = splash.make_splash_mha(masks, head_shards=1, q_seq_shards=1)
  # It does not scale the scores.
  return lambda query, *rest: jax.vmap(kernel)(query * FEATURES**-0.5, *rest)


def _make(make_attend, causal: bool, derivative: str, target: Target):
  tokens = jax.ShapeDtypeStruct(
    (BATCH, HEADS, LENGTH, FEATURES),
    jnp.bfloat16,
    sharding=on_one_device(target),
  )
  attend = make_attend(causal, target)
  return derived(attend, derivative, 3, *(tokens,) * 3)
