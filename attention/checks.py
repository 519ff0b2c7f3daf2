"""Checks of arguments, with messages that name the argument."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np


def check_floating(**arrays) -> None:
  """Raises unless every argument is a floating array or number."""
  for name, array in arrays.items():
    if isinstance(array, list | tuple):
      raise TypeError(f"{name} must be an array, got a {type(array).__name__}")
    chex.assert_type(
      jnp.result_type(array) if jnp.isscalar(array) else array,
      float,
      custom_message=f"{name} must hold floating-point numbers",
    )


def check_positive(**sizes: int | None) -> None:
  """Raises ValueError unless every size is None or at least 1."""
  for name, size in sizes.items():
    if size is not None and size < 1:
      raise ValueError(f"{name} must be at least 1, got {size}")


def check_leading(**arrays: Any) -> None:
  """Raises AssertionError unless the axes before the last two broadcast."""
  leading: tuple[int, ...] = ()
  for number, (name, array) in enumerate(arrays.items()):
    own = jnp.shape(array)[:-2]
    try:
      leading = jnp.broadcast_shapes(leading, own)
    except ValueError:
      raise AssertionError(
        f"{name} has leading axes {own}, which do not broadcast against "
        f"{leading}, those of {' and '.join([*arrays][:number])}"
      ) from None


def check_shape(
  name: str,
  array: Any,
  *,
  fits: str = "",  # the argument that determines the sizes
  **axes: int | None,
) -> None:
  """Raises AssertionError unless the last axes have these sizes; None: any."""
  shape = jnp.shape(array)
  last = shape[-len(axes) :]
  if len(last) == len(axes) and all(
    size is None or size == own for size, own in zip(axes.values(), last)
  ):
    return
  expected = ", ".join(
    axis if size is None else f"{axis}={size}" for axis, size in axes.items()
  )
  reason = f" to fit {fits}" if fits else ""
  raise AssertionError(
    f"{name} has shape {shape}, but must be [..., {expected}]{reason}"
  )


def check_tokens(**arrays) -> None:
  """Raises unless every argument is a floating array [..., T, D]."""
  for name, array in arrays.items():
    if not isinstance(array, jax.Array | np.ndarray):
      raise TypeError(
        f"{name} must be an array [..., length, features], got "
        f"{type(array).__name__}"
      )
    check_shape(name, array, length=None, features=None)
    check_floating(**{name: array})
