"""Chooses the implementation that serves a request, and runs it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from attention.checks import check_tokens
from attention.implementations import BY_NAME, Implementation, reference
from attention.meshes import on_any_mesh
from attention.normalizers import as_normalizer, is_softmax, softmax
from attention.request import Request, make_request, of_denominator
from attention.softmax import Statistics, from_lse, with_sink

ImplementationLike = str | Implementation | None

# Up to this many elements the dense formula is as fast, measured on CPUs
# (`docs/performance.md`), and compiles sooner.
_DENSE = 1 << 18


def dispatch(
  query: Any, key: Any, value: Any, **arguments: Any
) -> tuple[jax.Array, jax.Array | None]:
  """`dispatch_statistics` with the lse instead of the statistics."""
  normalizer = as_normalizer(arguments.get("normalizer"))
  if arguments.get("return_lse") and not is_softmax(normalizer):
    raise NotImplementedError(
      f"only softmax has a log-sum-exp: return_lse=True needs "
      f"normalizer=normalizers.softmax(...), got {normalizer!r}"
    )
  context, statistics = dispatch_statistics(query, key, value, **arguments)
  return context, None if statistics is None else statistics.lse


@on_any_mesh("TE", "T", "T")
def dispatch_statistics(
  query: Any,
  key: Any,
  value: Any,
  *,
  implementation: ImplementationLike = None,
  return_lse: bool = False,
  **arguments: Any,
) -> tuple[jax.Array, Statistics | None]:
  """The context and, with `return_lse`, the statistics of its rows."""
  request = make_request(query, key, value, return_lse=return_lse, **arguments)
  sink = getattr(request.normalizer, "sink", None)
  if sink is not None:
    request = dataclasses.replace(
      request, normalizer=softmax(), return_lse=True
    )
  context, rows = _computed(request, implementation)
  if sink is not None:
    context, rows = with_sink(context, rows, sink)
  return context, rows if return_lse else None


def _computed(request: Request, implementation: ImplementationLike):
  """The context and, if needed, the statistics of the rows."""
  if request.score.denominator is None:
    return _computed_by(request, implementation)
  request = dataclasses.replace(request, return_lse=True)
  context, rows = _computed_by(request, implementation)
  _, total = _computed_by(of_denominator(request), implementation)
  assert rows is not None
  assert total is not None
  scale = rows.relative_to(total)[..., None]
  return (context * scale).astype(context.dtype), total


def _computed_by(
  request: Request, implementation: ImplementationLike
) -> tuple[jax.Array, Statistics | None]:
  """The result of the implementation for the request's score."""
  if implementation is None:
    context, rows = _chosen(request)
  else:
    chosen = _named(implementation)
    if obstacle := chosen.obstacle(request):
      raise NotImplementedError(
        f"implementation={implementation!r} cannot serve this call: it "
        f"{obstacle}; implementation=None chooses one that can"
      )
    context, rows = _run(chosen, request)
  if rows is not None and not isinstance(rows, Statistics):
    rows = from_lse(rows)
  return context, rows


@on_any_mesh("TS")
def dispatch_weights(query: Any, key: Any, **arguments: Any) -> jax.Array:
  """The attention weights [..., T, S], float32 at least."""
  check_tokens(query=query, key=key)
  nothing = jnp.zeros((jnp.shape(key)[-2], 0), jnp.result_type(key))
  request = make_request(query, key, nothing, **arguments)
  return reference.weights(request)


def _named(implementation: Any) -> Implementation:
  """The implementation of an `implementation` argument other than None."""
  if isinstance(implementation, str) and implementation in BY_NAME:
    return BY_NAME[implementation]
  is_class = isinstance(implementation, type)
  if isinstance(implementation, Implementation) and not is_class:
    return implementation
  known = ", ".join(map(repr, BY_NAME))
  raise ValueError(
    f"implementation must be None, one of {known}, or an object with the "
    "methods of attention.implementations.Implementation, got "
    f"{implementation!r}"
  )


def _run(implementation: Implementation, request: Request):
  context, rows = implementation(request)
  return context.astype(request.query.dtype), rows


def _chosen(request: Request):
  """Runs the fastest implementation, by the rules of `docs/performance.md`."""
  blockwise = BY_NAME["blockwise"]
  is_dense = _is_small(request) or blockwise.obstacle(request) is not None
  portable = BY_NAME["reference"] if is_dense else blockwise
  if BY_NAME["cudnn"].obstacle(request) is not None:
    return _run(portable, request)
  if request.platform is not None:
    return _run(BY_NAME["cudnn"], request)
  # Under `jax.jit` the platform is known only when the program is lowered.
  context = jax.lax.platform_dependent(
    cuda=lambda: _run(BY_NAME["cudnn"], request)[0],
    default=lambda: _run(portable, request)[0],
  )
  return context, None


def _is_small(request: Request) -> bool:
  if not request.has_known_sizes:
    return False
  return math.prod(request.scores_shape) * request.elements_per_pair <= _DENSE
