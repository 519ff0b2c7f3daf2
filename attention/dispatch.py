"""Which implementation serves a call."""

import math
from collections.abc import Callable
from typing import Any

import jax

from attention.dropout import Dropout
from attention.implementations import cudnn, reference
from attention.implementations.blockwise import Blockwise
from attention.meshes import on_any_mesh
from attention.request import Call, Whole, prepared
from attention.scores import Score

NAMES = ("reference", "blockwise", "cudnn")
Implementation = str | Blockwise | None

_TILED = Blockwise()
# Up to so many numbers in all scores the dense formula is as fast, measured on
# CPUs (`docs/performance.md`), and compiles sooner.
_DENSE = 1 << 18


@on_any_mesh("TE", "T")
def solved(
  query: Any,
  key: Any,
  value: Any,
  *,
  score: Score | Callable,
  mask: Any = None,
  bias: Any = None,
  dropout: Dropout | None = None,
  implementation: Implementation = None,
  return_lse: bool = False,
  whole: Whole | None = None,
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
    whole: as in `Call`.

  Returns:
    The context in the query's dtype, and the lse, None if it is not wanted.

  Raises:
    NotImplementedError: if the implementation cannot serve the call.
    ValueError: if it is unknown, or as in `attend`.
  """
  call = prepared(
    query,
    key,
    value,
    score=score,
    mask=mask,
    bias=bias,
    dropout=dropout,
    whole=whole,
  )
  if implementation is None:
    implementation = fastest(call, return_lse)
  lse = None
  if implementation == "cudnn":
    if obstacle := cudnn.obstacle(call, return_lse):
      raise NotImplementedError(
        f"implementation='cudnn' cannot serve this call: cuDNN {obstacle}; "
        "implementation='blockwise' serves every call"
      )
    context = cudnn.context(call)
  elif implementation == "reference":
    context, lse = reference.context_and_lse(call)
  elif implementation == "blockwise":
    context, lse = _TILED(call)
  elif isinstance(implementation, Blockwise):
    context, lse = implementation(call)
  else:
    known = ", ".join(map(repr, NAMES))
    raise ValueError(
      f"implementation must be None or one of {known}, got {implementation!r}"
    )
  return context.astype(call.query.dtype), lse if return_lse else None


def fastest(call: Call, return_lse: bool) -> str:
  """The implementation to choose, by the rules of `docs/performance.md`."""
  if cudnn.obstacle(call, return_lse) is None:
    return "cudnn"
  if not call.has_known_sizes:
    return "reference"
  numbers = math.prod(call.scores_shape) * call.numbers_per_pair
  return "reference" if numbers <= _DENSE else "blockwise"
