"""Calls of a function by process 0 first, or by process 0 only."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

T = TypeVar("T")


def first_process_first(make: Callable[[], T]) -> T:
  """Calls a function that writes files in process 0, then in the others."""
  if jax.process_count() == 1:
    return make()
  made = make() if jax.process_index() == 0 else None
  multihost_utils.sync_global_devices("process 0 is done")
  return make() if made is None else made


def first_process_only(do: Callable[[], object]) -> None:
  """Calls a function in process 0 while the other processes wait."""
  if jax.process_index() == 0:
    do()
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("process 0 is done")
