"""Applies the layers of an encoder or decoder, unrolled or in a compiled loop.

Every layer owns its parameters in both cases, so that a run may change from one
to the other. Flax's `nn.scan` would stack them in the tree of parameters.
"""

import functools
from collections.abc import Callable, Sequence
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
  # Inside `jax.jit` one layer is traced for all of them, so that a function of
  # `nn.intercept_methods` sees one layer.
  plain = not (config.scan_layers or config.remat)  # the default
  if layers[0].is_initializing() or (plain and layers[0].scope.mutable):
    for layer in layers:
      x = layer(x, *operands, deterministic=deterministic)
    return x
  apply = _layer_function(layers[0], config, deterministic=deterministic)
  if isinstance(x, jax.core.Tracer):
    apply = jax.jit(apply)  # which traces its function once
  apply = functools.partial(apply, operands)
  of_layers = [_own(layer) for layer in layers]
  if config.scan_layers:
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *of_layers)
    x, stored = jax.lax.scan(apply, x, stacked)
  else:
    stored_by_layer = []
    for own in of_layers:
      x, of_layer = apply(x, own)
      stored_by_layer.append(of_layer)
    stored = jax.tree.map(lambda *each: [*each], *stored_by_layer)
  for name, (weights,) in stored.get(_WEIGHTS, {}).items():
    for layer, array in zip(layers, weights):
      layer.sow(_WEIGHTS, name, array)
  return x


def _layer_function(
  layer: Any, config: TransformerConfig, *, deterministic: bool
) -> Callable:
  """Makes the pure function (operands, x, `_own`) -> (x, stored weights)."""
  unbound = layer.clone(parent=None)
  mutable = [_WEIGHTS] if layer.is_mutable_collection(_WEIGHTS) else []

  def apply(operands, x, own):
    params, rngs = own
    return unbound.apply(
      {"params": params},
      x,
      *operands,
      deterministic=deterministic,
      rngs=rngs,
      mutable=mutable,
    )

  if not (config.scan_layers or config.remat):
    return apply
  # The backward pass of a loop would read every intermediate result, the
  # masks of dropout too.
  return jax.checkpoint(
    apply,
    prevent_cse=not config.scan_layers,
    policy=None if config.remat else jax.checkpoint_policies.dots_saveable,
  )


def _own(layer: Any) -> tuple[Any, dict[str, jax.Array]]:
  """The parameters and the random key of a layer."""
  has_rng = layer.has_rng("dropout")
  rngs = {"dropout": layer.make_rng("dropout")} if has_rng else {}
  return layer.variables["params"], rngs
