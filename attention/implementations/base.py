"""The protocol that every implementation of attention follows."""

from typing import Protocol, runtime_checkable

import jax

from attention.arrays.softmax import Statistics
from attention.request import Request


@runtime_checkable
class Implementation(Protocol):
  """An algorithm that `attend` can call, given as `implementation=`.

  `attention.implementations.BY_NAME` contains the implementations that have
  names. `attend` accepts any other object with these two methods. A third one,
  `variant(request)`, is optional: if its hashable results for two platforms
  (`request.target`) differ, a program has a branch for each.

  The weights of a score whose `denominator` is not None are not a softmax;
  `request.pair_at` then returns two arrays of scores.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attend
    >>> class Mean:
    ...   def obstacle(self, request):
    ...     return "has no mask" if request.mask is not None else None
    ...
    ...   def __call__(self, request):
    ...     mean = request.value.mean(-2, keepdims=True)
    ...     length = request.query.shape[-2]
    ...     return jnp.repeat(mean, length, axis=-2), None
    >>> tokens = jnp.eye(2)
    >>> attend(tokens, tokens, tokens, implementation=Mean())
    Array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
  """

  def obstacle(self, request: Request) -> str | None:
    """The reason why it cannot serve a request, or None if it can.

    The reason completes the sentence "implementation=... cannot serve this
    call: it ...".
    """

  def __call__(
    self, request: Request
  ) -> tuple[jax.Array, Statistics | jax.Array | None]:
    """The context [..., T, E] and the lse [..., T], with `request.leading`.

    The lse may be None if `request.return_lse` is false. An implementation may
    return `Statistics` instead, its maximum and sum apart, which are exact for
    scores of any size. `attend` converts the context to the query's dtype.
    """
