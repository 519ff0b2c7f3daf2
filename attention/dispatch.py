"""Which implementation serves a request."""

import math
from collections.abc import Callable
from typing import Any

import jax

from attention.dropout import Dropout
from attention.implementations import cudnn, reference
from attention.implementations.blockwise import Blockwise
from attention.meshes import on_any_mesh
from attention.request import Combined, Request, make_request
from attention.scores import Score

NAMES = ("reference", "blockwise", "cudnn")
ImplementationLike = str | Blockwise | None

_TILED = Blockwise()
# Up to so many numbers in all scores the dense formula is as fast, measured on
# CPUs (`docs/performance.md`), and compiles sooner.
_DENSE = 1 << 18


@on_any_mesh("TE", "T")
def dispatch(
  query: Any,
  key: Any,
  value: Any,
  *,
  score: Score | Callable,
  mask: Any = None,
  bias: Any = None,
  dropout: Dropout | None = None,
  implementation: ImplementationLike = None,
  return_lse: bool = False,
  combined: Combined | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """`attend` with dropout as an object and always a pair of results.

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk].
    value: [..., S, E].
    score: as in `attend`.
    mask: as in `attend`.
    bias: as in `attend`.
    dropout: of the weights, or None.
    implementation: as in `attend`.
    return_lse: whether the lse is wanted.
    combined: as in `Request`.

  Returns:
    The context in the query's dtype, and the lse, None if it is not wanted.

  Raises:
    NotImplementedError: if the implementation cannot serve the request.
    ValueError: if it is unknown, or as in `attend`.
  """
  request = make_request(
    query,
    key,
    value,
    score=score,
    mask=mask,
    bias=bias,
    dropout=dropout,
    combined=combined,
  )
  if implementation is None:
    implementation = fastest(request, return_lse)
  lse = None
  if implementation == "cudnn":
    if obstacle := cudnn.obstacle(request, return_lse):
      raise NotImplementedError(
        f"implementation='cudnn' cannot serve this request: cuDNN {obstacle}; "
        "implementation='blockwise' serves every call"
      )
    context = cudnn.context(request)
  elif implementation == "reference":
    context, lse = reference.context_and_lse(request)
  elif implementation == "blockwise":
    context, lse = _TILED(request)
  elif isinstance(implementation, Blockwise):
    context, lse = implementation(request)
  else:
    known = ", ".join(map(repr, NAMES))
    raise ValueError(
      f"implementation must be None or one of {known}, got {implementation!r}"
    )
  return context.astype(request.query.dtype), lse if return_lse else None


def fastest(request: Request, return_lse: bool) -> str:
  """The implementation to choose, by the rules of `docs/performance.md`."""
  if cudnn.obstacle(request, return_lse) is None:
    return "cudnn"
  if not request.has_known_sizes:
    return "reference"
  numbers = math.prod(request.scores_shape) * request.elements_per_pair
  return "reference" if numbers <= _DENSE else "blockwise"
