"""Taylor coefficients of functions that `jax.experimental.jet` cannot compute.

It has no rule for loops and `jax.checkpoint`, and it fails for every function
with a derivative rule of its own (`jax.custom_jvp`), such as `jax.nn.relu`.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import set_current_trace, take_current_trace

from attention.implementations.closure import without_captured

# The array at time 0, and the coefficients of t, t^2, ...: the polynomial
# start + sum_k terms[k - 1] t^k, without factorials.
Path = tuple[jax.Array, Sequence[Any]]


def with_taylor_coefficients(function: Callable) -> Callable:
  """Decorates a function to run inside `jax.experimental.jet`."""

  @functools.wraps(function)
  def run(*args, **kwargs):
    # Whoever calls jet has imported it.
    jet: Any = sys.modules.get("jax.experimental.jet")
    if jet is None:
      return function(*args, **kwargs)
    with take_current_trace() as trace:
      pass
    if not isinstance(trace, jet.JetTrace):
      return function(*args, **kwargs)
    # Arrays of the arguments, and those that functions among them captured.
    program, arrays = without_captured(lambda: function(*args, **kwargs))
    pairs = [*map(trace.to_primal_terms_pair, arrays)]
    paths = {
      n: (value, [0.0 if each is jet.zero_term else each for each in terms])
      for n, (value, terms) in enumerate(pairs)
      if terms is not jet.zero_series and _is_real(value)
    }

    def at(time):
      return program(
        [
          _position(paths[n], time) if n in paths else value
          for n, (value, _) in enumerate(pairs)
        ]
      )

    def traced(value, *derivatives):
      if not _is_real(value):
        return value
      terms = [
        each / math.factorial(n) for n, each in enumerate(derivatives, start=1)
      ]
      return jet.JetTracer(trace, value, terms)

    with set_current_trace(trace.parent_trace):
      return jax.tree.map(traced, *_derivatives(at, trace.order))

  return run


def _derivatives(function: Callable, order: int) -> Sequence[Any]:
  """The value of a function of time at 0, and its derivatives."""

  def derivatives(time):
    return (function(time),)

  for _ in range(order):
    derivatives = _with_next(derivatives)
  return derivatives(jnp.zeros(()))


def _with_next(derivatives: Callable) -> Callable:
  """A function's derivatives at a time, and one more."""

  def more(time):
    values, tangents = jax.jvp(derivatives, (time,), (jnp.ones_like(time),))
    return *values, tangents[-1]

  return more


def _position(path: Path, time: jax.Array) -> jax.Array:
  """The point of a path at a time."""
  start, terms = path
  time = time.astype(start.dtype)
  change = jnp.zeros_like(start)
  for term in reversed(terms):
    change = (change + jnp.asarray(term, start.dtype)) * time
  return start + change


def _is_real(value: Any) -> bool:
  return jnp.issubdtype(jnp.result_type(value), jnp.floating)
