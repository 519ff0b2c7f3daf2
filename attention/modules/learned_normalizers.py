"""Flax modules that own the parameters of a normalizer."""

import typing
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention import normalizers
from attention.names import NormalizerName
from attention.normalizers import Normalizer, as_normalizer

NORMALIZER_NAMES: tuple[str, ...] = typing.get_args(NormalizerName)

# About -log 20: the weights of 20 equal scores of zero add up to about 1.
INITIAL_BIAS = -3.0


class LearnedNormalizer(nn.Module):
  """Creates the parameters of a normalizer from its name.

  "softmax_sink" learns a sink and "sigmoid" a bias for each head; "entmax" is
  1.5-entmax. The others have no parameters.

  Attributes:
    normalizer: a name from `NORMALIZER_NAMES`, a normalizer or a function of
      scores, used unchanged; None is softmax.
    num_heads: H; None for a single head, without a head axis.
    param_dtype: the dtype in which parameters are stored.

  Example:
    >>> import jax
    >>> module = LearnedNormalizer("softmax_sink", num_heads=2)
    >>> normalizer, _ = module.init_with_output(jax.random.key(0))
    >>> normalizer.sink
    Array([0., 0.], dtype=float32)
  """

  normalizer: str | Normalizer | Callable | None = None
  num_heads: int | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self) -> Normalizer:
    """The normalizer, a pytree usable in `lax.scan` and outside of modules."""
    name = self.normalizer
    if not isinstance(name, str):
      return as_normalizer(name)
    if name not in NORMALIZER_NAMES:
      raise ValueError(
        f"normalizer must be a function of scores or one of "
        f"{', '.join(NORMALIZER_NAMES)}; got {name!r}"
      )
    if name == "softmax_sink":
      return normalizers.softmax(self._parameter("sink", 0.0))
    if name == "sigmoid":
      return normalizers.sigmoid(self._parameter("bias", INITIAL_BIAS))
    return getattr(normalizers, name)()

  def _parameter(self, name: str, initial: float):
    shape = () if self.num_heads is None else (self.num_heads,)
    initializer = nn.initializers.constant(initial)
    return self.param(name, initializer, shape, self.param_dtype)
