"""A call of `attend` with its arguments checked and lined up."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from attention import axes, cudnn, reference
from attention.biases.types import Bias, as_bias
from attention.blockwise import Blockwise, numbers_per_pair
from attention.checks import check_axis, check_tokens
from attention.dropout import Dropout
from attention.masks.types import Mask, as_mask
from attention.pairwise import Pairwise
from attention.scores import Score, as_score

TILED = Blockwise()
NAMES = ("reference", "blockwise", "cudnn")
# Up to so many numbers in all scores the dense formula is faster, measured on
# CPUs (`docs/performance.md`): it computes no score twice.
_DENSE = 1 << 21
Implementation = str | Blockwise | None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """Checked arguments; the arrays have one rank, that of the scores."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  score: Score
  mask: Mask | None
  bias: Bias | None
  scores_shape: tuple[int, ...]

  def run(
    self,
    dropout: Dropout | None,
    implementation: Implementation,
    return_lse: bool = True,
  ) -> tuple[jax.Array, jax.Array | None]:
    """The context in the query's dtype, and the lse if that is wanted."""
    tokens = (self.query, self.key, self.value)
    choices: dict[str, Any] = {
      "score": self.score,
      "mask": self.mask,
      "bias": self.bias,
      "dropout": dropout,
    }
    obstacle = cudnn.obstacle(*tokens, return_lse=return_lse, **choices)
    if implementation is None:
      implementation = self._choice(obstacle)
    lse = None
    if isinstance(implementation, Blockwise):
      context, lse = implementation(*tokens, **choices)
    elif implementation == "blockwise":
      context, lse = TILED(*tokens, **choices)
    elif implementation == "reference":
      context, lse = reference.context_and_lse(*tokens, **choices)
    elif implementation != "cudnn":
      known = ", ".join(map(repr, NAMES))
      raise ValueError(
        f"implementation must be None or one of {known}, got {implementation!r}"
      )
    elif obstacle:
      raise NotImplementedError(
        f"implementation='cudnn' cannot serve this call: cuDNN {obstacle}; "
        "implementation='blockwise' serves every call"
      )
    else:
      context = cudnn.context(*tokens, score=self.score, mask=self.mask)
    return context.astype(self.query.dtype), lse

  def _choice(self, obstacle: str | None) -> str:
    """The fastest implementation, by the rules of `docs/performance.md`."""
    if obstacle is None:
      return "cudnn"
    return "reference" if self._numbers() <= _DENSE else "blockwise"

  def _numbers(self) -> int:
    """How many numbers the dense formula would hold at once."""
    scores = math.prod(self.scores_shape)
    return scores * numbers_per_pair(self.score, self.query, self.key)


def prepared(query, key, value, *, score, mask, bias) -> Call:
  """Checks the arguments of `attend` and lines their leading axes up.

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk].
    value: [..., S, E], or None where only weights are wanted.
    score: anything `attention.scores.as_score` takes.
    mask: anything `attention.masks.as_mask` takes, or None.
    bias: anything `attention.biases.as_bias` takes, or None.

  Returns:
    The call, ready to run.
  """
  check_tokens(query=query, key=key)
  if value is None:
    value = jnp.zeros((jnp.shape(key)[-2], 0), jnp.result_type(key))
  check_tokens(value=value)
  query, key, value = (jnp.asarray(array) for array in (query, key, value))
  length = key.shape[-2]
  check_axis(value, "value", -2, length, "key's length")
  check_leading(query=query, key=key, value=value)
  score = as_score(score)
  query, key, value = axes.aligned(query, key, value)
  scores = _scores_shape(score, query, key)
  rank = max(len(scores), value.ndim)
  query, key, value = (axes.with_rank(x, rank) for x in (query, key, value))
  leading = jnp.broadcast_shapes(scores[:-2], value.shape[:-2])
  shape = (*leading, *scores[-2:])
  if mask is not None:
    mask = _fitting("mask", as_mask(mask), shape)
  if bias is not None:
    bias = _fitting("bias", as_bias(bias), shape)
  return Call(query, key, value, score, mask, bias, scores)


def check_leading(**arrays: jax.Array) -> None:
  """Raises AssertionError, naming the first array that does not broadcast."""
  leading: tuple[int, ...] = ()
  for name, array in arrays.items():
    try:
      leading = jnp.broadcast_shapes(leading, array.shape[:-2])
    except ValueError:
      raise AssertionError(
        f"{name} has leading axes {array.shape[:-2]}, which do not broadcast "
        f"against {leading}, those of the arguments before it"
      ) from None


def _scores_shape(score: Score, query, key) -> tuple[int, ...]:
  """The shape of the scores, found without computing them."""
  shape = jax.eval_shape(score, query, key).shape
  lengths = (query.shape[-2], key.shape[-2])
  if shape[-2:] != lengths:
    raise ValueError(
      f"score must return [..., T, S] = [..., {lengths[0]}, {lengths[1]}] for "
      f"query {query.shape} and key {key.shape}, it returned {shape}"
    )
  return shape


def _fitting(name: str, pairs: Pairwise, shape: tuple[int, ...]):
  """`pairs`, if its values broadcast to `shape`."""
  query_length, key_length = shape[-2:]
  pairs.check(query_length, key_length)
  rows, columns = (
    jax.ShapeDtypeStruct((length,), jnp.int32) for length in shape[-2:]
  )
  rank = len(shape) - 2
  block = jax.eval_shape(
    lambda rows, columns: jnp.asarray(pairs.block(rows, columns, rank)),
    rows,
    columns,
  )
  try:
    fits = jnp.broadcast_shapes(block.shape, shape) == shape
  except ValueError:
    fits = False
  if not fits:
    raise ValueError(
      f"{name} of shape {block.shape} does not broadcast to the scores' {shape}"
    )
  return pairs
