"""Running sums of numbers by position, in one kernel.

XLA computes the sums of the log gates of `forgetting` in 10 operations on a
TPU. Here they and their transposes are one each.
"""

import functools
from typing import Any

import jax.numpy as jnp

from attention.implementations.pallas.hopper import running_sums as hopper
from attention.implementations.pallas.tpu import running_sums as tpu
from attention.scores import decay
from attention.transforms.custom_transpose import with_kernel_as_transpose
from attention.transforms.tangent_rule import instantiated, with_tangent_rule

# Longer rows, with what is computed from them, do not fit on the chip.
_LONGEST = 1 << 15


def make_running_sums(target: str, interpret: Any) -> decay.RunningSums:
  """`decay.running_sums` by kernels for a target, "tpu" or "hopper"."""
  module = tpu if target == "tpu" else hopper
  sums = functools.partial(module.running_sums, interpret)

  def of_last(residuals, cotangents):
    del residuals
    given = [each for each in cotangents if each is not None]
    return sums(lambda *numbers: (sum(numbers),), *given, is_reversed=True)

  def kernel(numbers):
    total, rest = sums(decay.exact_parts, numbers, is_reversed=False)
    return total, total, rest

  def running_sums(numbers):
    return with_tangent_rule(kernel, rule, numbers)

  def rule(primals, tangents):
    tangents = [*map(instantiated, tangents)]
    sums = with_kernel_as_transpose(_twice, of_last, [], tangents)
    return running_sums(*primals), (*sums, jnp.zeros_like(sums[0]))

  def running_sums_of(numbers):
    is_long = target == "tpu" and numbers.shape[-1] > _LONGEST
    if is_long or 0 in numbers.shape:
      return decay.running_sums(numbers)
    return running_sums(numbers)

  return running_sums_of


def _twice(residuals, arguments):
  """The running sums of one array, in XLA, for queries and for keys."""
  del residuals
  return [jnp.cumsum(arguments[0], axis=-1)] * 2
