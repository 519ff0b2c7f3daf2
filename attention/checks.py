"""Checks of arguments, with messages that name the argument."""

from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_floating(**arrays) -> None:
  """Raises unless every argument is an array, or a number, of floats.

  `chex.assert_type` would name the argument only at the end of a long message.
  """
  for name, array in arrays.items():
    if isinstance(array, list | tuple | str | None):
      raise TypeError(f"{name} must be an array, got {array!r}")
    dtype = getattr(array, "dtype", None) or jnp.result_type(array)
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    if not is_floating or not 16 <= jnp.finfo(dtype).bits <= 64:
      raise AssertionError(
        f"{name} must hold floating-point numbers of 16 to 64 bits, got {dtype}"
      )


def check_integers(**numbers: Any) -> None:
  """Raises TypeError unless every argument is a Python integer."""
  for name, number in numbers.items():
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
      raise TypeError(f"{name} must be an integer, got {number!r}")


def check_numbers(**numbers: Any) -> None:
  """Raises TypeError unless every argument is a number that is known."""
  for name, number in numbers.items():
    if not isinstance(number, Real):
      raise TypeError(f"{name} must be a number, got {number!r}")


def check_above_zero(**numbers: Any) -> None:
  """Raises unless every argument is a number above 0."""
  check_numbers(**numbers)
  for name, number in numbers.items():
    if not number > 0:
      raise ValueError(f"{name} must be above 0, got {number}")


def check_parameter_above_zero(**parameters: Any) -> None:
  """Raises if a parameter is a number, rather than an array, of at most 0."""
  for name, parameter in parameters.items():
    if isinstance(parameter, Real):
      check_above_zero(**{name: parameter})


def check_positive(**sizes: Any) -> None:
  """Raises unless every size is None or an integer of at least 1."""
  for name, size in sizes.items():
    if size is not None:
      check_integers(**{name: size})
    if size is not None and size < 1:
      raise ValueError(f"{name} must be at least 1, got {size}")


def check_sizes(**shapes: Any) -> None:
  """Raises TypeError unless every argument is a sequence, as a shape is."""
  for name, shape in shapes.items():
    if not isinstance(shape, list | tuple):
      raise TypeError(f"{name} must be a tuple of sizes, got {shape!r}")


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


def check_examples(name: str, array: Any, tokens: jax.Array) -> None:
  """Raises AssertionError unless it broadcasts to the tokens' leading axes."""
  shape, leading = jnp.shape(array), tokens.shape[:-2]
  try:
    fits = jnp.broadcast_shapes(shape, leading) == leading
  except ValueError:
    fits = False
  if not fits:
    raise AssertionError(
      f"{name} has shape {shape}, which does not broadcast to {leading}, the "
      "leading axes of the tokens"
    )


def check_shape(
  name: str,
  array: Any,
  *,
  fits: str = "",  # the argument that determines the sizes
  **axes: int | None,
) -> None:
  """Raises AssertionError unless the last axes have these sizes; None: any."""
  if isinstance(array, list | tuple):
    raise TypeError(f"{name} must be an array, got {array!r}")
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
