"""Flax modules that own the parameters of a score."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention import scores
from attention.checks import check_positive
from attention.scores import Score, as_score

SCORE_NAMES = ("dot", "scaled_dot", "general", "additive", "concat", "cosine")

# A softmax over cosines, at most 1, is nearly uniform. With this factor, the
# weight of an equal key is e^10 times that of an orthogonal one.
INITIAL_SHARPNESS = 10.0


class LearnedScore(nn.Module):
  """Creates the parameters of a score from its name.

  Attributes:
    score: a name from `SCORE_NAMES`, or a score or callable, used unchanged.
    hidden_size: A of the additive and the concat score; None means the key's
      number of features.
    num_heads: H; None for a single head, without a head axis.
    num_key_value_heads: K; the additive score projects keys once for each
      key/value head.
    dtype: the dtype of the returned parameters; None means `param_dtype`.
    param_dtype: the dtype in which parameters are stored.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> module = LearnedScore("additive", hidden_size=16)
    >>> score, _ = module.init_with_output(jax.random.key(0), 8, 6)
    >>> score(jnp.ones((3, 8)), jnp.ones((5, 6))).shape
    (3, 5)
  """

  score: str | Score | Callable = "additive"
  hidden_size: int | None = None
  num_heads: int | None = None
  num_key_value_heads: int | None = None
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, query_size: int, key_size: int) -> Score:
    """The score for queries [..., T, Dq] and keys [..., S, Dk].

    It is a pytree, usable in `lax.scan` and outside of modules.
    """
    if not isinstance(self.score, str):
      return as_score(self.score)
    if self.score not in SCORE_NAMES:
      raise ValueError(
        f"score must be a callable or one of {', '.join(SCORE_NAMES)}; "
        f"got {self.score!r}"
      )
    check_positive(hidden_size=self.hidden_size)
    hidden_size = key_size if self.hidden_size is None else self.hidden_size
    heads, memory_heads = self.num_heads, self.num_key_value_heads
    match self.score:
      case "dot":
        return scores.dot()
      case "scaled_dot":
        return scores.scaled_dot()
      case "general":
        return scores.general(self._weight("weight", query_size, key_size))
      case "additive":
        return scores.additive(
          self._weight("query_weight", query_size, hidden_size),
          self._weight(
            "key_weight", key_size, hidden_size, heads=memory_heads or heads
          ),
          self._vector("score_weight", hidden_size),
          self._parameter("bias", nn.initializers.zeros, hidden_size),
        )
      case "concat":
        return scores.concat(
          self._weight("weight", query_size + key_size, hidden_size),
          self._vector("score_weight", hidden_size),
        )
      case _:
        return scores.cosine(self._sharpness())

  def _weight(self, name, inputs, outputs, heads=None):
    """[D, A], or [H, D, A] with the fan-in of one head."""
    heads_axis = () if self.num_heads is None else (0,)
    initialize = nn.initializers.lecun_normal(
      in_axis=-2, out_axis=-1, batch_axis=heads_axis
    )
    return self._parameter(name, initialize, inputs, outputs, heads=heads)

  def _vector(self, name, size):
    """[A] or [H, A], scaled so that the score's variance is about 1."""
    initialize = nn.initializers.normal(1.0 / math.sqrt(max(size, 1)))
    return self._parameter(name, initialize, size)

  def _sharpness(self):
    """[] or [H], positive, as its logarithm is the parameter."""
    constant = nn.initializers.constant(math.log(INITIAL_SHARPNESS))
    return jnp.exp(self._parameter("log_sharpness", constant))

  def _parameter(self, name, initialize, *sizes, heads=None):
    """[*sizes], or [H, *sizes] if there are heads."""
    heads = heads or self.num_heads
    shape = sizes if heads is None else (heads, *sizes)
    array = self.param(name, initialize, shape, self.param_dtype)
    return array if self.dtype is None else array.astype(self.dtype)
