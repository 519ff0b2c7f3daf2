"""Dropout of attention weights."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Dropout:
  """Inverted dropout: what is kept grows so that the mean stays.

  See "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
  Srivastava et al., 2014, section 10.
  """

  rate: float
  rng: jax.Array
  # One draw for all leading axes, which Flax calls broadcast dropout.
  shared: bool = False

  def multiplier(self, shape: tuple[int, ...], dtype) -> jax.Array:
    """0 or 1 / (1 - rate) for weights of `shape`, to multiply them with."""
    if self.shared:
      shape = (1,) * (len(shape) - 2) + shape[-2:]
    keep = jax.random.bernoulli(self.rng, 1.0 - self.rate, shape)
    kept = 1.0 / (1.0 - self.rate) if self.rate < 1.0 else 0.0
    return jnp.where(keep, kept, 0.0).astype(dtype)


def make_dropout(
  rate: float, rng: jax.Array | None, shared: bool = False
) -> Dropout | None:
  """The dropout of a call, None if there is none.

  Args:
    rate: the probability to drop a weight.
    rng: a random key, needed if `rate` is positive.
    shared: whether all leading axes share one draw.

  Returns:
    A `Dropout` or None.

  Raises:
    ValueError: if `rate` is not a probability, or `rng` is missing.
  """
  if not 0.0 <= rate <= 1.0:
    raise ValueError(f"dropout_rate must be from 0 to 1, got {rate}")
  if rate == 0.0:
    return None
  if rng is None:
    raise ValueError(
      f"dropout_rate={rate} needs rng, for instance jax.random.key(0)"
    )
  return Dropout(rate, rng, shared)
