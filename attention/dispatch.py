"""Chooses the implementation that serves a request, and runs it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays.meshes import on_any_mesh
from attention.arrays.softmax import Statistics, from_lse, with_sink
from attention.checks import check_tokens
from attention.implementations import BY_NAME, Implementation, reference
from attention.implementations.reference.size import is_small
from attention.normalizers import as_normalizer, is_softmax, softmax
from attention.request import Request, make_request
from attention.taylor import with_taylor_coefficients

ImplementationLike = str | Implementation | None

# The names of `jax.lax.platform_dependent`; the last stands for all others.
_PLATFORMS = ("cpu", "cuda", "tpu")


def _as_one_program(function: Callable) -> Callable:
  """Compiles the call if JAX shall raise for infinite numbers."""
  # `jax.debug_infs` checks the results of programs, and each operation outside
  # of `jax.jit` is one. Hidden scores are -inf.

  @functools.wraps(function)
  def run(*tokens, **arguments):
    if not jax.config.jax_debug_infs:  # type: ignore[attr-defined]
      return function(*tokens, **arguments)
    return jax.jit(lambda: function(*tokens, **arguments))()

  return run


@with_taylor_coefficients
@_as_one_program
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
    assert rows is not None
    context, rows = with_sink(context, rows, sink)
  return context, rows if return_lse else None


def _computed(
  request: Request, implementation: ImplementationLike
) -> tuple[jax.Array, Statistics | None]:
  """The context and, if needed, the statistics of the rows."""
  if request.platform is None:
    request = dataclasses.replace(request, branch=_platform_of_mesh())
  choose: Callable[[Request], Implementation] = _fastest
  if implementation is not None:
    chosen = _named(implementation)
    if obstacle := chosen.obstacle(request):
      raise NotImplementedError(
        f"implementation={implementation!r} cannot serve this call: it "
        f"{obstacle}; implementation=None chooses one that can"
      )

    def choose(_):
      return chosen

  context, rows = _on_its_platform(request, choose)
  return context, _as_statistics(rows)


@with_taylor_coefficients
@_as_one_program
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


def _on_its_platform(
  request: Request, choose: Callable[[Request], Implementation]
) -> tuple[jax.Array, Any]:
  """Runs `choose(request)` for the platform that computes the request."""
  # Under `jax.jit` without a mesh, the platform is known only when the program
  # is lowered. The program then has a branch for each implementation that
  # `choose` returns.
  if request.platform or request.branch:
    return _run(choose(request), request)
  functions: dict[Any, Callable] = {}  # by implementation and variant
  branches = []
  for platform in _PLATFORMS:
    own = dataclasses.replace(request, branch=platform)
    implementation = choose(own)
    variant = getattr(implementation, "variant", lambda _: None)(own)
    branch = functools.partial(_without_unused, implementation, own)
    # JAX joins branches that are one function.
    branches.append(functions.setdefault((id(implementation), variant), branch))
  if len(functions) == 1:
    return _run(choose(request), request)
  *named, default = branches
  result = jax.lax.platform_dependent(
    **dict(zip(_PLATFORMS, named)), default=default
  )
  return result if request.return_lse else (result[0], None)


def _platform_of_mesh() -> str | None:
  """The platform of the mesh of `jax.set_mesh`; None for unknown GPUs."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  platform = getattr(device, "platform", None)
  # "gpu" stands for several platforms of `jax.lax.platform_dependent`.
  if platform == "gpu" and device.device_kind.startswith("NVIDIA "):
    return "cuda"
  return platform if platform in ("cpu", "tpu") else None


def _without_unused(implementation: Implementation, request: Request):
  """The result, with statistics if needed, as all branches must return it."""
  context, rows = _run(implementation, request)
  if not request.return_lse:
    return context, None
  return context, _as_statistics(rows).broadcast_to(context.shape[:-1])


def _as_statistics(rows: Any) -> Any:
  return rows if isinstance(rows, Statistics | None) else from_lse(rows)


def _fastest(request: Request) -> Implementation:
  """The fastest implementation, by the rules of `docs/measurements.md`."""
  if BY_NAME["cudnn"].obstacle(request) is None:
    return BY_NAME["cudnn"]
  blockwise = BY_NAME["blockwise"]
  is_dense = is_small(request) or blockwise.obstacle(request) is not None
  return BY_NAME["reference"] if is_dense else blockwise
