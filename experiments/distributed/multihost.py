"""What one of several processes does for all of them."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

T = TypeVar("T")


def first_process_first(make: Callable[[], T]) -> T:
  """Calls a function in every process, in the first one before the others.

  Args:
    make: leaves files that it finds again when it is called once more.

  Returns:
    What it returns.

  Example:
    >>> first_process_first(lambda: 3)
    3
  """
  if jax.process_count() == 1:
    return make()
  made = make() if jax.process_index() == 0 else None
  multihost_utils.sync_global_devices("the first process is done")
  return make() if made is None else made


def first_process_only(do: Callable[[], object]) -> None:
  """Calls a function in the first process; the others wait for its end.

  Args:
    do: changes files that all of them see.

  Example:
    >>> first_process_only(lambda: print("once"))
    once
  """
  if jax.process_index() == 0:
    do()
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("the first process is done")
