"""Merges attention over disjoint sets of keys."""

from collections.abc import Sequence
from typing import Annotated as Shaped

import jax
import jax.numpy as jnp

from attention.arrays.softmax import from_lse, merged
from attention.checks import check_floating, check_leading
from attention.types import Array


def merge(
  contexts: Sequence[Shaped[Array, "... T E"]],
  lses: Sequence[Shaped[Array, "... T"]],
) -> tuple[Shaped[jax.Array, "... T E"], Shaped[jax.Array, "... T"]]:
  """The context over all keys, from contexts over disjoint sets of keys.

  Part p has the weight exp(lse_p - lse), its share of the softmax's sum. See
  "Ring Attention with Blockwise Transformers for Near-Infinite Context", Liu et
  al., 2023, section 3 (https://arxiv.org/abs/2310.01889).

  A float32 lse near 1e4 is rounded by up to 5e-4, and so is the share of its
  part. `ring_attention` merges the maximum and the sum of the exponentials of
  each part instead, which have no such error.

  Args:
    contexts: [..., T, E] each, from `attend(..., return_lse=True)`.
    lses: [..., T] each; -inf where a query may attend to no key of a part.

  Returns:
    The context [..., T, E] in the dtype of the first part, and the lse.

  Raises:
    AssertionError: if an lse does not have its context's shape without E, if T
      or E differ, or if leading axes do not broadcast.
    ValueError: if there are no parts, or not as many lses as contexts.

  Example:
    >>> import jax.numpy as jnp
    >>> parts = [jnp.array([[1.0]]), jnp.array([[3.0]])]
    >>> merge(parts, [jnp.array([0.0]), jnp.array([0.0])])
    (Array([[2.]], dtype=float32), Array([0.69], dtype=float32))
  """
  contexts, lses = [*contexts], [*lses]
  if len(contexts) != len(lses) or not len(contexts):
    raise ValueError(
      f"contexts and lses must be equally many and at least one, got "
      f"{len(contexts)} and {len(lses)}"
    )
  for name, arrays in {"contexts": contexts, "lses": lses}.items():
    check_floating(**{f"{name}[{n}]": each for n, each in enumerate(arrays)})
  first = jnp.shape(contexts[0])
  for part, (context, lse) in enumerate(zip(contexts, lses)):
    if jnp.shape(context)[-2:] != first[-2:]:
      raise AssertionError(
        f"contexts[{part}] has shape {jnp.shape(context)}, but must have T and "
        f"E of contexts[0], {first}"
      )
    if jnp.shape(lse) != jnp.shape(context)[:-1]:
      raise AssertionError(
        f"lses[{part}] has shape {jnp.shape(lse)}, expected "
        f"{jnp.shape(context)[:-1]} from contexts[{part}]"
      )
  check_leading(**{f"contexts[{n}]": each for n, each in enumerate(contexts)})
  dtype = jnp.result_type(*lses)
  parts = [from_lse(jnp.asarray(lse, dtype)) for lse in lses]
  context, statistics = merged([*map(jnp.asarray, contexts)], parts)
  return context.astype(jnp.result_type(contexts[0])), statistics.lse
