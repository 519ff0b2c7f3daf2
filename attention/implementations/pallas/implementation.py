"""The Pallas implementation, and which requests it serves."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays.softmax import Statistics
from attention.implementations.blockwise import Blockwise
from attention.request import Request

_TARGETS = {"tpu": "tpu", "cuda": "hopper"}


@dataclasses.dataclass(frozen=True)
class Pallas:
  """Kernels for TPUs and Hopper GPUs.

  Score, mask and bias are traced inside the kernels. On TPUs they may be any
  function; on GPUs the score is one of the library, or one sum over the
  features of a query and a key, such as an additive score or a distance.

  Attributes:
    target: "tpu" or "hopper", for instance to compile for a device that is
      absent; None is that of the platform.
    interpret: False compiles the kernels. True interprets those for TPUs on any
      platform, and an instance of `jax.experimental.pallas.tpu.InterpretParams`
      interprets them with checks, for instance of races.
    query_block: the queries of a tile on TPUs, a multiple of 128; None chooses
      it.
    key_block: the keys of a tile on TPUs, a multiple of 128; None chooses it.

  Raises:
    ValueError: if the target is unknown, cannot be interpreted by True, or a
      size is no multiple of 128.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attend
    >>> tokens = jnp.eye(5)
    >>> interpreted = Pallas(interpret=True)
    >>> attend(tokens, tokens, tokens, implementation=interpreted).shape
    (5, 5)
  """

  target: str | None = None
  interpret: Any = False
  query_block: int | None = None
  key_block: int | None = None

  def __post_init__(self):
    if self.target not in (None, *_TARGETS.values()):
      raise ValueError(
        f"target must be 'tpu', 'hopper' or None, got {self.target!r}"
      )
    if self.target == "hopper" and self.interpret is True:
      raise ValueError(
        "interpret=True interprets the kernels for TPUs, not those for "
        "target='hopper', for which JAX has no public interpreter"
      )
    for name in ("query_block", "key_block"):
      block = getattr(self, name)
      if block is not None and (block < 1 or block % 128):
        raise ValueError(f"{name} must be a multiple of 128, got {block}")

  def obstacle(self, request: Request) -> str | None:
    """Why the kernels cannot serve a request, or None if they can."""
    is_known = self.target is not None or request.target in _TARGETS
    if not self.interpret and not is_known:
      return (
        f"needs a TPU or a Hopper GPU, the platform is {request.target};"
        " Pallas(target=...) compiles for one that is absent,"
        " Pallas(interpret=True) interprets the kernels"
      )
    if not request.has_known_sizes:
      return "needs known sizes"
    has_blocks = self.query_block is not None or self.key_block is not None
    if has_blocks and self.target_of(request) == "hopper":
      return "has tiles of 64 on GPUs: query_block and key_block must be None"
    if request.dtype != jnp.float32:
      if not self.interpret:
        return f"computes in float32, got {request.dtype}"
      if any(each != request.dtype for each in _dtypes(request)):
        return f"interprets {request.dtype} only if all arrays have this dtype"
    if _has_no_kernel(request):
      return None
    return self._call().obstacle(self, self.with_values(request))

  def __call__(self, request: Request) -> tuple[jax.Array, Statistics]:
    """The context [..., T, E] and the statistics [..., T]."""
    if _has_no_kernel(request):
      return Blockwise()(request)
    features = request.value.shape[-1]
    context, statistics = self._call().compute(self, self.with_values(request))
    return context[..., :features], statistics

  def target_of(self, request: Request) -> str:
    """The kind of device of the kernels."""
    own = "tpu" if self.interpret else _TARGETS.get(request.target, "tpu")
    return self.target or own

  @property
  def absent_platform(self) -> str | None:
    """The platform of `target`; None if kernels are for the request's own."""
    if self.target is None or self.interpret:
      return None
    return next(name for name, own in _TARGETS.items() if own == self.target)

  def with_values(self, request: Request) -> Request:
    """The request with values of one feature at least, on GPUs of 64."""
    # A caller that needs the statistics only gives values without features.
    value, combined = request.value, request.combined
    if value.shape[-1]:
      return request
    features = 64 if self.target_of(request) == "hopper" else 1

    def filled(tokens):
      return jnp.zeros((*tokens.shape[:-1], features), tokens.dtype)

    if combined is not None:
      combined = filled(combined[0]), combined[1]
    return dataclasses.replace(request, value=filled(value), combined=combined)

  def _call(self) -> Any:
    """The module of the kernels; importing Pallas takes time."""
    from attention.implementations.pallas import call

    return call


def _has_no_kernel(request: Request) -> bool:
  """Whether there is no score, or all tokens of the scores are empty."""
  return request.is_empty or 0 in (
    request.query.shape[-1],
    request.key.shape[-1],
  )


def _dtypes(request: Request) -> Iterator[Any]:
  """The dtypes of the floating arrays of tokens, score and bias."""
  arrays = request.tokens, request.score, request.bias
  for dtype in map(jnp.result_type, jax.tree.leaves(arrays)):
    if jnp.issubdtype(dtype, jnp.floating):
      yield dtype
