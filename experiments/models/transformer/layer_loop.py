"""Applies the layers of an encoder or decoder, unrolled or in a compiled loop.

Every layer owns its parameters in both cases, so that a run may change from one
to the other. Flax's `nn.scan` would stack them in the tree of parameters.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.config import TransformerConfig

_WEIGHTS = "intermediates"  # the collection in which layers store weights


def apply_layers(
  layers: Sequence[Any],  # bound, and equal but for their parameters
  config: TransformerConfig,
  x: jax.Array,
  *operands: jax.Array,  # of every layer
  deterministic: bool,
) -> jax.Array:
  """Maps x [B, T, D] by `layer(x, *operands)` of each layer in turn."""
  if layers[0].is_initializing() or not (config.scan_layers or config.remat):
    for layer in layers:
      x = layer(x, *operands, deterministic=deterministic)
    return x
  unbound = layers[0].clone(parent=None)
  stores = layers[0].is_mutable_collection(_WEIGHTS)

  def apply(x, own):
    params, rngs = own
    return unbound.apply(
      {"params": params},
      x,
      *operands,
      deterministic=deterministic,
      rngs=rngs,
      mutable=[_WEIGHTS] if stores else [],
    )

  # The backward pass of a loop would read every intermediate result, the masks
  # of dropout too. Without a loop XLA recomputes those that are cheap.
  apply = jax.checkpoint(
    apply,
    prevent_cse=not config.scan_layers,
    policy=None if config.remat else jax.checkpoint_policies.dots_saveable,
  )
  own = jax.tree.map(lambda *each: jnp.stack(each), *map(_own, layers))
  x, stored = jax.lax.scan(apply, x, own, unroll=not config.scan_layers)
  for name, (weights,) in stored.get(_WEIGHTS, {}).items():
    for layer, array in zip(layers, weights):
      layer.sow(_WEIGHTS, name, array)
  return x


def _own(layer: Any) -> tuple[Any, dict[str, jax.Array]]:
  """The parameters and the random key of a layer."""
  has_rng = layer.has_rng("dropout")
  rngs = {"dropout": layer.make_rng("dropout")} if has_rng else {}
  return layer.variables["params"], rngs
