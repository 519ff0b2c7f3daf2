"""Errors of an implementation on a device, beside the dense formula.

Kernels are interpreted in the tests. This compares what a device computes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention import attend, masks
from benchmarks.accelerators.attention_cases import (
  OPTIONS,
  SCORES,
)
from benchmarks.devices.contenders import draw

# The largest error of a context or a gradient, divided by its largest number.
# Numbers of bfloat16 are rounded by 0.4%, several times.
LIMIT = 0.05


class Check(NamedTuple):
  """The largest relative error of a case with a mask, or why it has none."""

  case: str
  mask: str
  error: float
  reason: str = ""

  @property
  def passes(self) -> bool:
    """Whether the error is that of rounding; without an error, yes."""
    return bool(self.reason) or self.error <= LIMIT


def checks(
  implementation: Any,
  *,
  names: Sequence[str] | None = None,
  length: int = 300,
  features: int = 64,
) -> Iterator[Check]:
  """Cases without a mask, causal and with lengths; all by default.

  They are scores, and normalizers and dropout of scaled dot products.
  """
  patterns = {
    "none": None,
    "causal": masks.causal(),
    "lengths": masks.padding(jnp.asarray([length, length // 3])),
  }
  for name in [*SCORES, *OPTIONS] if names is None else names:
    case = SCORES.get(name, SCORES["scaled_dot"])
    arrays = _parameters(case.shapes, length, features)
    for pattern, mask in patterns.items():
      options = {"mask": mask, **(OPTIONS[name]() if name in OPTIONS else {})}
      try:
        error = _error(
          implementation, case.bind, arrays, options, length, features
        )
      except NotImplementedError as reason:
        yield Check(name, pattern, math.nan, str(reason))
      else:
        yield Check(name, pattern, error)


def _parameters(
  shapes: Sequence[tuple[int, ...]], length: int, features: int
) -> list[jax.Array]:
  """The arrays of a score, for these sizes in place of those of the cases."""
  sizes = {4096: length, 128: features, 256: 2 * features, 8: 2}
  shapes = [tuple(sizes.get(n, n) for n in shape) for shape in shapes]
  numbers = draw(*shapes, dtype=jnp.float32) if shapes else []
  return [_valid(0.1 * each, length) for each in numbers]


def _valid(numbers: jax.Array, length: int) -> jax.Array:
  """Numbers as a score needs them: positive factors, logarithms of gates."""
  if numbers.ndim == 0:
    return 0.1 + 0.1 * jnp.abs(numbers)
  if numbers.shape == (2,):
    return 1.0 + numbers
  return -jnp.abs(numbers) if numbers.shape[-1] == length else numbers


def _error(
  implementation: Any,
  bind: Callable,
  arrays: Sequence[jax.Array],
  options: dict[str, Any],
  length: int,
  features: int,
) -> float:
  """The largest error of the context and the gradients."""
  tokens = draw(*[(2, 2, length, features)] * 3)

  def results(implementation, dtype):
    def loss(tokens, arrays):
      context = attend(
        *tokens,
        score=bind(*arrays),
        implementation=implementation,
        **options,
      ).astype(jnp.float32)
      return jnp.sum(jnp.sin(context)), context

    given = [each.astype(dtype) for each in tokens]
    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    return jax.tree.leaves(run(given, [*arrays]))

  with jax.default_matmul_precision("highest"):
    want = results("reference", jnp.float32)
  got = results(implementation, jnp.bfloat16)
  return max(map(_difference, got, want))


def _difference(got: jax.Array, want: jax.Array) -> float:
  got = got.astype(jnp.float32)
  # The gradient of a single number is a sum in which terms cancel.
  least = 1e-6 if want.size > 2 else 1.0
  scale = jnp.maximum(jnp.max(jnp.abs(want)), least)
  return float(jnp.max(jnp.abs(got - want)) / scale)
