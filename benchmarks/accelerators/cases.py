"""What is compiled: named programs for a target."""

from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.aot.targets import Target


class Case(NamedTuple):
  """A program to compile.

  Attributes:
    name: its parts, separated by slashes.
    make: target -> the function and its abstract arguments.
    default: whether it belongs to the default subset.
    for_tpus: whether it is compiled for TPUs only.
  """

  name: str
  make: Callable[[Target], tuple[Callable[..., Any], tuple[Any, ...]]]
  default: bool = False
  for_tpus: bool = False


def all_cases() -> dict[str, Case]:
  """All cases by name."""
  # Imported late: they import JAX.
  from benchmarks.accelerators import (
    attention_cases,
    layout_cases,
    peer_cases,
    small_cases,
    step_cases,
  )

  modules = (
    attention_cases,
    small_cases,
    peer_cases,
    step_cases,
    layout_cases,
  )
  return {case.name: case for module in modules for case in module.cases()}


def selected(
  known: dict[str, Case], only: list[str], *, full: bool
) -> list[str]:
  """The names that start with a prefix of `only`; by default the subset.

  Raises:
    ValueError: if no name starts with a prefix.
  """
  for prefix in only:
    if not any(name.startswith(prefix) for name in known):
      raise ValueError(f"--only: no case starts with {prefix!r}; see --list")
  if only:
    return [name for name in known if name.startswith(tuple(only))]
  return [name for name in known if full or known[name].default]


def for_target(
  known: dict[str, Case], names: list[str], target: Target
) -> list[str]:
  """The names of cases that can be compiled for a target."""
  is_tpu = target.platform == "tpu"
  return [name for name in names if is_tpu or not known[name].for_tpus]
