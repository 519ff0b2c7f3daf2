"""The interface of scores: two maps of tokens and a function of pairs.

    score(query, key) = pair(map_query(query), map_key(key))

The maps are called once on all tokens, `pair` once per tile. A score is a
pytree, so its arrays receive gradients. Any function `(query, key) -> scores`
is a score too, with identity maps.
"""

# Overrides keep the docstrings of what they override.
# ruff: noqa: D102

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from attention import axes
from attention.equality import EqualByValue
from attention.head_parameters import grouped


class Score(EqualByValue):
  """A score: inherit, override `pair` and, where useful, the maps.

  Example:
    >>> import dataclasses, jax, jax.numpy as jnp
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True, eq=False)
    ... class NegativeDistance(Score):
    ...   def pair(self, query, key):
    ...     gap = query[..., :, None, :] - key[..., None, :, :]
    ...     return -jnp.sum(gap * gap, axis=-1)
    >>> NegativeDistance()(jnp.zeros((2, 3)), jnp.ones((4, 3))).shape
    (2, 4)
  """

  def check(self, query: jax.Array, key: jax.Array) -> None:
    """Raises AssertionError if the shapes do not fit; it names the argument."""

  def map_query(self, query: jax.Array) -> jax.Array:
    """[..., T, Dq] to [..., T, X], token by token."""
    return query

  def map_key(self, key: jax.Array) -> jax.Array:
    """[..., S, Dk] to [..., S, Y], token by token."""
    return key

  def pair(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """Mapped [..., t, X] and [..., s, Y] to [..., t, s] scores.

    `attend` calls it on tiles, so a score may depend on its own two tokens
    only.
    """
    raise NotImplementedError(f"{type(self).__name__} must define pair")

  def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
    """[..., T, Dq] and [..., S, Dk] to [..., T, S]."""
    self.check(query, key)
    return self.pair(self.map_query(query), self.map_key(key))

  def group_heads(self, num_key_value_heads: int, num_groups: int) -> "Score":
    """The same score for heads laid out as [K, G] instead of [H].

    If every field declares the rank of one head's parameter, for instance by
    `dataclasses.field(metadata=MATRIX)`, parameters [H, ...] become [K, G, ...]
    and [K, ...] become [K, 1, ...]. Any other score is called in the [H]
    layout, which repeats the keys in memory.
    """
    heads = (num_key_value_heads, num_groups)
    return grouped(self, *heads) or GroupedHeads(self, *heads)


_IMPURE = (
  "JAX traces a score more than once, so it must be a pure function. Create a "
  "module's parameters before `attend`: call the module once, or use `setup`."
)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class FunctionScore(Score):
  """A plain callable `(query, key) -> scores` as a score."""

  function: Callable[[jax.Array, jax.Array], jax.Array]

  def pair(self, query, key):
    try:
      return self.function(query, key)
    except jax.errors.UnexpectedTracerError as error:
      error.add_note(_IMPURE)
      raise

  def tree_flatten(self):
    # A callable that is a pytree (`jax.tree_util.Partial`) keeps its leaves.
    if jax.tree_util.all_leaves([self.function]):
      return (), self.function
    return (self.function,), None

  @classmethod
  def tree_unflatten(cls, function, children):
    return cls(*children) if children else cls(function)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MappedKeys(Score):
  """A score of keys to which `map_key` has already been applied."""

  score: Score

  def map_query(self, query):
    return self.score.map_query(query)

  def pair(self, query, key):
    return self.score.pair(query, key)

  def group_heads(self, num_key_value_heads, num_groups):
    return MappedKeys(self.score.group_heads(num_key_value_heads, num_groups))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedHeads(Score):
  """Calls a score that supports heads [H] only, for heads [K, G]."""

  score: Score
  num_key_value_heads: int = dataclasses.field(metadata={"static": True})
  num_groups: int = dataclasses.field(metadata={"static": True})

  def check(self, query, key):
    self.score.check(self._join(query), self._join(key))

  def map_query(self, query):
    return self._split(self.score.map_query(self._join(query)))

  def map_key(self, key):
    if isinstance(self.score, FunctionScore):
      return key  # `pair` then repeats tiles instead of all keys
    return self._split(self.score.map_key(self._join(key)))

  def pair(self, query, key):
    return self._split(self.score.pair(self._join(query), self._join(key)))

  def _join(self, tokens):
    """[..., K or 1, G or 1, T, D] to [..., H, T, D]."""
    heads = (self.num_key_value_heads, self.num_groups)
    leading, rest = tokens.shape[:-4], tokens.shape[-2:]
    tokens = jnp.broadcast_to(tokens, leading + heads + rest)
    return jnp.reshape(tokens, (*leading, math.prod(heads), *rest))

  def _split(self, tokens):
    return axes.split_axis(
      tokens, -3, self.num_key_value_heads, self.num_groups
    )


def with_mapped_keys(score: Score) -> Score:
  """The same score, for keys to which its `map_key` has been applied.

  An RNN decoder then maps the encoder's states once, not at every step.

  Args:
    score: a bound score.

  Returns:
    A score `s` with `s(query, score.map_key(key)) == score(query, key)`.

  Raises:
    ValueError: if `score` is not a `Score`; `attention.scores.as_score` makes
      one of a function.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> query, key = jnp.ones((2, 3)), jnp.ones((4, 3))
    >>> score = scores.cosine(sharpness=5.0)
    >>> memory = score.map_key(key)  # once
    >>> with_mapped_keys(score)(query, memory)[0, 0]
    Array(5., dtype=float32)
  """
  if not isinstance(score, Score):
    raise ValueError(
      f"score must be a Score, got {score!r}; attention.scores.as_score makes "
      "one of a function"
    )
  return MappedKeys(score)


def trace_score(score: Score, query, key) -> tuple[jax.ShapeDtypeStruct, int]:
  """The shape of the scores and the elements per pair, by one trace."""
  results = []

  def trace(query, key):
    score.check(query, key)
    query, key = score.map_query(query), score.map_key(key)
    closed, result = jax.make_jaxpr(score.pair, return_shape=True)(query, key)
    elements = 1  # also if sizes are symbols of `jax.export`
    if all(isinstance(size, int) for size in (*query.shape, *key.shape)):
      largest = _largest(closed.jaxpr)
      if largest > max(query.size, key.size):  # else the tokens, reshaped
        pairs = math.prod(getattr(result, "shape", ()))
        elements = max(-(-largest // max(pairs, 1)), 1)
    results.append((result, elements))

  jax.eval_shape(trace, query, key)
  return results[0]


def _largest(jaxpr) -> int:
  """The number of elements of the largest array that a jaxpr makes."""
  sizes = [0]
  for equation in jaxpr.eqns:
    sizes += [variable.aval.size for variable in equation.outvars]
    sizes += map(_largest, jaxprs_in_params(equation.params))
  return max(sizes)
