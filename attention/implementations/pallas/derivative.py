"""Derivatives of kernels: the blockwise rule, with kernels for reverse mode.

The rule of `blockwise.derivative` needs only the context and the statistics,
which a kernel has computed; entmax and sparsemax have JAX's derivatives of
`blockwise.rows` as the rule. Forward mode and higher orders differentiate that
rule. Reverse mode is its transpose, which kernels compute: one the gradients of
queries and of arrays, one those of keys and values, and on TPUs one that of a
bias with a number for each pair. If another array is differentiated, JAX
transposes the rule.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attention.arrays.softmax import Statistics
from attention.implementations.blockwise.tiles import with_length
from attention.implementations.closure import Program
from attention.implementations.non_finite import where_finite
from attention.implementations.pallas import hopper, tpu
from attention.implementations.pallas.blockwise_rule import Arguments
from attention.implementations.pallas.operands import Operand
from attention.implementations.pallas.results import Results
from attention.request import Combined
from attention.transforms.custom_transpose import with_kernel_as_transpose
from attention.transforms.tangent_rule import with_tangent_rule


@dataclasses.dataclass(frozen=True, eq=False)
class KernelAttention:
  """Attention as kernels, and the rule of its derivatives."""

  kernels: tpu.Problem | hopper.Problem
  rule: Program  # see `make_rule`
  # For each array that the rule captured, the operands of kernels.
  operands_of: list[list[int]]
  score_is_finite: bool  # see `Score.is_finite`

  def __call__(
    self, arguments: Arguments, combined: Combined | None = None
  ) -> tuple[jax.Array, Statistics]:
    """The context and the statistics, with derivatives of any order.

    See `Request.combined`, which has no derivatives of its own.
    """
    context, statistics, _ = self._results(False, arguments, combined)
    return context, statistics

  def _results(
    self, for_gradients: bool, arguments: Arguments, combined: Combined | None
  ) -> Results:
    """Those of the forward kernel with its rule, and what gradients need."""

    def primal(arguments, combined):
      if combined is None:
        return self._forward(arguments, for_gradients)
      return Results(*combined)

    def rule(primals, tangents):
      (arguments, combined), (of_arguments, _) = primals, tangents
      if combined is None:
        outputs = self._results(True, arguments, None)
      else:
        outputs = Results(*combined)
      of_outputs = self._tangents(arguments, outputs, of_arguments)
      if for_gradients:
        return outputs, of_outputs
      return outputs._replace(means=None), of_outputs._replace(means=None)

    return with_tangent_rule(primal, rule, arguments, combined)

  def _forward(self, arguments: Arguments, for_gradients: bool) -> Results:
    results = self.kernels.forward(
      arguments.operands,
      self._padded(arguments.tokens),
      for_gradients=for_gradients,
    )
    length, axis = arguments.tokens[0].shape[-2], results.context.ndim - 2
    return jax.tree.map(
      lambda each: with_length(each, length, axis=axis), results
    )

  def _padded(self, tokens: Sequence[jax.Array]) -> list[jax.Array]:
    """The query, the key and the value with the lengths that kernels need."""
    query, key, value = tokens
    queries, keys = self.kernels.padded_lengths
    return [
      with_length(query, queries),
      with_length(key, keys),
      with_length(value, keys, "constant"),
    ]

  def _tangents(self, arguments, outputs, tangents):
    """The tangents of the results of `_forward`."""
    linear = tangents.linear
    chosen = [
      place
      for place, each in enumerate(linear)
      if not isinstance(each, SymbolicZero)
    ]
    if not chosen:
      return jax.tree.map(jnp.zeros_like, outputs)
    residuals, structure = jax.tree.flatten((arguments, outputs))
    of_context, of_total = with_kernel_as_transpose(
      functools.partial(self._rule, structure, chosen),
      functools.partial(self._reverse, structure, chosen)
      if self._has_kernels(chosen)
      else None,
      residuals,
      [linear[place] for place in chosen],
    )
    # The tangent of the total includes that of the maximum. Nothing reads that
    # of the means: derivatives of a rule do not depend on them.
    of_maximum, of_means = jax.tree.map(
      jnp.zeros_like, (outputs.statistics.maximum, outputs.means)
    )
    return Results(of_context, Statistics(of_maximum, of_total), of_means)

  def _of_finite_tokens(self, arguments, chosen, tangents) -> list[Any]:
    """Tangents that are zero for NaN and infinity in tokens."""
    first = len(arguments.captured)
    return [
      tangent
      if place < first
      else where_finite(
        jnp.isfinite(arguments.linear[place]),
        tangent,
        keeps_cotangents=self.score_is_finite or place == first + 2,
      )
      for place, tangent in zip(chosen, tangents)
    ]

  def _has_kernels(self, chosen) -> bool:
    """Whether kernels compute the gradients of these arrays."""
    return self.kernels.has_gradients and all(
      place >= len(self.operands_of) or self.operands_of[place]
      for place in chosen
    )

  def _rule(self, structure, chosen, residuals, tangents):
    """The tangents of the context and the total, by the blockwise rule."""
    arguments, outputs = jax.tree.unflatten(structure, residuals)
    context, statistics, _ = outputs
    is_masked = self.kernels.is_masked
    if is_masked:
      # As in `non_finite`, what is NaN has no derivatives. Kernels set a whole
      # row of the context to NaN, so its first feature shows it.
      no_total = jnp.isnan(statistics.total)
      no_context = (no_total | jnp.isnan(context[..., 0]))[..., None]
      context = jnp.where(jnp.isnan(context), jnp.zeros_like(context), context)
      rows = (jnp.where(no_total, 0.0, each) for each in statistics)
      statistics = Statistics(*rows)
      tangents = self._of_finite_tokens(arguments, chosen, tangents)
      tokens = [
        jnp.where(jnp.isfinite(each), each, jnp.zeros_like(each))
        for each in arguments.tokens
      ]
      arguments = arguments._replace(tokens=tokens)

    def results(*arrays):
      changed = arguments.with_linear(chosen, arrays)
      wide = context.astype(statistics.total.dtype)
      of_context, of_total = self.rule(
        changed.captured, changed.tokens, wide, statistics
      )
      of_context = of_context.astype(context.dtype)
      if is_masked:
        zeros = jnp.zeros_like(of_context)
        of_context = jnp.where(no_context, zeros, of_context)
        of_total = jnp.where(no_total, 0.0, of_total)
      return of_context, of_total

    primals = [arguments.linear[place] for place in chosen]
    return [*jax.jvp(results, primals, [*tangents])[1]]

  def _reverse(self, structure, chosen, residuals, cotangents):
    """The transpose of `_rule`, by kernels."""
    # The kernels return zeros for NaN and infinity, if keys may be hidden.
    arguments, outputs = jax.tree.unflatten(structure, residuals)
    tokens = self._padded(arguments.tokens)
    first = len(arguments.captured)
    places = [place for place in chosen if place < first]
    wanted = [number for place in places for number in self.operands_of[place]]
    has_keys = first + 1 in chosen or first + 2 in chosen
    rows = self._padded_rows(outputs, *cotangents)
    of_tokens, of_operands = self.kernels.gradients(
      arguments.operands, tokens, rows, wanted, of_keys=has_keys
    )
    parts = dict(zip(wanted, of_operands))
    results = {
      place: functools.reduce(
        jnp.add, [parts[n] for n in self.operands_of[place]]
      ).reshape(arguments.linear[place].shape)
      for place in places
    }
    for number, each in enumerate(of_tokens):
      own_length = arguments.tokens[number].shape[-2]
      results[first + number] = each[..., :own_length, :]
    return [
      _summed(results[place], arguments.linear[place]) for place in chosen
    ]

  def _padded_rows(self, outputs, of_context, of_total) -> dict[str, jax.Array]:
    """What kernels of gradients read of the forward kernel's results."""
    context, (maximum, total), means = outputs
    if of_context is None:
      of_context = jnp.zeros_like(context)
    rows = {
      "maximum": maximum,
      "total": total,
      "context": context if means is None else means,
      "cotangent": of_context,
    }
    if of_total is not None and means is None:
      rows["of_total"] = of_total
    length, axis = self.kernels.padded_lengths[0], context.ndim - 2
    return {
      name: with_length(each, length, "constant", axis)
      for name, each in rows.items()
    }


def _summed(gradient: jax.Array, like: jax.Array) -> jax.Array:
  """The sum over axes along which `like` has size 1, in its dtype."""
  axes = tuple(
    axis
    for axis, size in enumerate(like.shape)
    if size == 1 and gradient.shape[axis] > 1
  )
  if axes:
    gradient = jnp.sum(gradient, axis=axes, keepdims=True)
  return gradient.astype(like.dtype)


def shared_operands(
  captured: Sequence[Any], operands: Sequence[Operand]
) -> list[list[int]]:
  """For each captured array, the operands of kernels that are this array."""
  return [
    [
      number
      for number, operand in enumerate(operands)
      if operand.origin is array
    ]
    for array in captured
  ]
