"""Functions of the user: a pytree that holds one, and hints about errors."""

# `tree_flatten` and `tree_unflatten` are JAX's protocol.
# ruff: noqa: D102

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

_IMPURE = (
  "JAX traces a function more than once, so it must be pure. Create a module's "
  "parameters before `attend`: call the module once, or use `setup`."
)
_INDEX = (
  "A function of `attend` receives traced arrays. Use jax.numpy, and index JAX "
  "arrays, jnp.asarray(array)[index]."
)


def is_of_this_package(kind: type) -> bool:
  """Whether a class is one of this package, not of the user."""
  return kind.__module__.startswith(__name__.partition(".")[0] + ".")


def check_takes(
  function: Callable, arguments: Sequence[str], name: str, hint: str = ""
) -> None:
  """Raises ValueError unless a function can be called with these arguments.

  The hint is for a function that needs more.
  """
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # A builtin may have none.
    return
  try:
    signature.bind(*arguments)
  except TypeError:
    found = tuple(signature.parameters)
    needs_more = len(found) > len(arguments)
    raise ValueError(
      f"{name} takes ({', '.join(arguments)}), got a function of "
      f"({', '.join(found)}){hint if needs_more else ''}"
    ) from None


def called(function: Callable, *arguments: Any) -> Any:
  """function(*arguments); errors of traced arrays come with a hint."""
  try:
    return function(*arguments)
  except jax.errors.UnexpectedTracerError as error:
    error.add_note(_IMPURE)
    raise
  except jax.errors.TracerArrayConversionError as error:
    error.add_note(_INDEX)
    raise


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionPytree:
  """Inherit from it, and register the class as a pytree node."""

  function: Callable[..., Any]

  def tree_flatten(self) -> tuple[tuple, Any]:
    # A callable that is a pytree (`jax.tree_util.Partial`) keeps its leaves.
    if jax.tree_util.all_leaves([self.function]):
      return (), self.function
    return (self.function,), None

  @classmethod
  def tree_unflatten(cls, function: Any, children: tuple) -> Self:
    return cls(*children) if children else cls(function)
