"""Score functions, which compute all scores [..., T, S] at once.

The bound scores of `attention.scores.classical` define their formulas. If the
shapes do not fit, a function raises AssertionError, which names the argument.
"""

import inspect
from collections.abc import Callable
from typing import Annotated as Shaped

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from attention.arrays.matmul import matmul_precision
from attention.checks import check_leading, check_tokens
from attention.scores import classical
from attention.scores.base import Score
from attention.scores.callables import FunctionScore
from attention.transforms.function_pytree import check_takes

# In `attention.scores`.
_CONSTRUCTORS: dict[str, type[Score]] = {
  "dot": classical.Dot,
  "scaled_dot": classical.ScaledDot,
  "general": classical.General,
  "additive": classical.Additive,
  "concat": classical.Concat,
  "cosine": classical.Cosine,
}


def _evaluated(score: Score, query, key, precision: PrecisionLike) -> jax.Array:
  """The scores, rounded from float32 to the inputs' common dtype."""
  check_tokens(query=query, key=key)
  check_leading(query=query, key=key)
  query, key = jnp.asarray(query), jnp.asarray(key)
  score = _with_arrays(score)
  dtype = jnp.result_type(query, key, *jax.tree.leaves(score))
  with matmul_precision(precision):
    return score(query, key).astype(dtype)


def dot_score(
  query: Shaped[jax.Array, "... T D"],
  key: Shaped[jax.Array, "... S D"],
  *,
  precision: PrecisionLike = None,
) -> Shaped[jax.Array, "... T S"]:
  """Luong's dot score, q . k.

  See "Effective Approaches to Attention-based Neural Machine Translation",
  Luong et al., 2015, section 3.1 (https://arxiv.org/abs/1508.04025).

  Args:
    query: [..., T, D].
    key: [..., S, D]; leading axes broadcast against query's.
    precision: of the products, as in `attend`.

  Returns:
    [..., T, S] scores, unnormalised, in the inputs' common dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> dot_score(jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0]]))
    Array([[11.]], dtype=float32)
  """
  return _evaluated(classical.Dot(), query, key, precision)


def scaled_dot_score(
  query: Shaped[jax.Array, "... T D"],
  key: Shaped[jax.Array, "... S D"],
  scale: float | Shaped[jax.Array, "..."] | None = None,
  *,
  precision: PrecisionLike = None,
) -> Shaped[jax.Array, "... T S"]:
  """The Transformer's scaled dot score, scale * q . k.

  See "Attention Is All You Need", Vaswani et al., 2017, equation 1
  (https://arxiv.org/abs/1706.03762).

  Args:
    query: [..., T, D].
    key: [..., S, D]; leading axes broadcast against query's.
    scale: a number, or an array [...] over leading axes; None means D ** -0.5.
    precision: of the products, as in `attend`.

  Returns:
    [..., T, S] scores, unnormalised, in the inputs' common dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> scaled_dot_score(jnp.ones((1, 4)), jnp.ones((2, 4)))
    Array([[2., 2.]], dtype=float32)
  """
  return _evaluated(classical.ScaledDot(scale), query, key, precision)


def general_score(
  query: Shaped[jax.Array, "... T Dq"],
  key: Shaped[jax.Array, "... S Dk"],
  weight: Shaped[jax.Array, "... Dq Dk"],
  *,
  precision: PrecisionLike = None,
) -> Shaped[jax.Array, "... T S"]:
  """Luong's general score, q . W k.

  See "Effective Approaches to Attention-based Neural Machine Translation",
  Luong et al., 2015, section 3.1 (https://arxiv.org/abs/1508.04025).

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk]; leading axes broadcast against query's.
    weight: [..., Dq, Dk].
    precision: of the products, as in `attend`.

  Returns:
    [..., T, S] scores, unnormalised, in the inputs' common dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> general_score(jnp.ones((1, 2)), jnp.ones((1, 3)), jnp.ones((2, 3)))
    Array([[6.]], dtype=float32)
  """
  return _evaluated(classical.General(weight), query, key, precision)


def additive_score(
  query: Shaped[jax.Array, "... T Dq"],
  key: Shaped[jax.Array, "... S Dk"],
  query_weight: Shaped[jax.Array, "... Dq A"],
  key_weight: Shaped[jax.Array, "... Dk A"],
  score_weight: Shaped[jax.Array, "... A"],
  bias: Shaped[jax.Array, "... A"] | None = None,
  *,
  precision: PrecisionLike = None,
) -> Shaped[jax.Array, "... T S"]:
  """Bahdanau's additive score, v . tanh(W_q q + W_k k + b).

  See "Neural Machine Translation by Jointly Learning to Align and Translate",
  Bahdanau et al., 2014, appendix A.1.2 (https://arxiv.org/abs/1409.0473).

  Args:
    query: [..., T, Dq] decoder states.
    key: [..., S, Dk] encoder states; leading axes broadcast against query's.
    query_weight: [..., Dq, A].
    key_weight: [..., Dk, A].
    score_weight: [..., A], the paper's v.
    bias: [..., A] or None.
    precision: of the projections, as in `attend`.

  Returns:
    [..., T, S] scores, unnormalised, in the inputs' common dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> query, key, weight = jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.eye(2)
    >>> additive_score(query, key, weight, weight, jnp.ones(2))
    Array([[1.93]], dtype=float32)
  """
  score = classical.Additive(query_weight, key_weight, score_weight, bias)
  return _evaluated(score, query, key, precision)


def concat_score(
  query: Shaped[jax.Array, "... T Dq"],
  key: Shaped[jax.Array, "... S Dk"],
  weight: Shaped[jax.Array, "... Dq+Dk A"],
  score_weight: Shaped[jax.Array, "... A"],
  *,
  precision: PrecisionLike = None,
) -> Shaped[jax.Array, "... T S"]:
  """Luong's concat score, v . tanh(W [q; k]).

  This is the additive score without a bias, with its two weights stacked. See
  "Effective Approaches to Attention-based Neural Machine Translation", Luong et
  al., 2015, section 3.1 (https://arxiv.org/abs/1508.04025).

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk]; leading axes broadcast against query's.
    weight: [..., Dq + Dk, A]; the rows of the query come first.
    score_weight: [..., A], the paper's v.
    precision: of the projections, as in `attend`.

  Returns:
    [..., T, S] scores, unnormalised, in the inputs' common dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> query, key = jnp.ones((1, 2)), jnp.ones((1, 1))
    >>> concat_score(query, key, jnp.ones((3, 1)), jnp.ones(1))
    Array([[0.995]], dtype=float32)
  """
  score = classical.Concat(weight, score_weight)
  return _evaluated(score, query, key, precision)


def cosine_score(
  query: Shaped[jax.Array, "... T D"],
  key: Shaped[jax.Array, "... S D"],
  sharpness: float | Shaped[jax.Array, "..."] = 1.0,
  *,
  precision: PrecisionLike = None,
) -> Shaped[jax.Array, "... T S"]:
  """Content-based addressing, sharpness * cos(q, k).

  See "Neural Turing Machines", Graves et al., 2014, equations 5 and 6
  (https://arxiv.org/abs/1410.5401). A token of zeros scores 0.

  Args:
    query: [..., T, D].
    key: [..., S, D]; leading axes broadcast against query's.
    sharpness: the paper's beta, a number, or an array [...] over leading axes.
    precision: of the products, as in `attend`.

  Returns:
    [..., T, S] scores, unnormalised, in the inputs' common dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> cosine_score(jnp.array([[3.0, 4.0]]), jnp.array([[2.0, 0.0]]))
    Array([[0.6]], dtype=float32)
  """
  return _evaluated(classical.Cosine(sharpness), query, key, precision)


def _with_arrays(score: Score) -> Score:
  """The score, with arrays for objects that convert, such as `nnx.Param`."""

  def converts(leaf):
    return hasattr(leaf, "__jax_array__")

  return jax.tree.map(
    lambda leaf: jnp.asarray(leaf) if converts(leaf) else leaf,
    score,
    is_leaf=converts,
  )


def as_score(score: Score | Callable) -> Score:
  """The `Score` for a `score` argument of `attend`.

  Args:
    score: a bound score, one of this module's score functions that needs no
      parameters, or any callable (query, key) -> scores.

  Returns:
    A bound score; a callable gets identity maps.

  Raises:
    ValueError: if `score` is not callable, a class, or takes other arguments.

  Example:
    >>> as_score(scaled_dot_score)
    ScaledDot(scale=None)
  """
  if isinstance(score, Score):
    return _with_arrays(score)
  if isinstance(score, type):
    raise ValueError(
      f"score is the class {score.__name__}; call it to make a score: "
      f"{_call(score)}"
    )
  if not callable(score):
    raise ValueError(
      f"score must be a callable (query, key) -> scores, got {score!r}; "
      "attention.scores has dot(), scaled_dot(), general(weight) and others"
    )
  if score is dot_score:
    return classical.Dot()
  if score is scaled_dot_score:
    return classical.ScaledDot()
  if score is cosine_score:
    return classical.Cosine()
  hint = "; bind the others, for instance with functools.partial"
  if getattr(score, "__module__", "") == __name__:
    name = getattr(score, "__name__", "").removesuffix("_score")
    if name in _CONSTRUCTORS:
      hint = f"; bind its parameters: {_call(_CONSTRUCTORS[name])}"
  check_takes(score, ("query", "key"), "score", hint)
  return FunctionScore(score)


def _call(constructor: type) -> str:
  """Returns the call of a constructor, such as "scores.general(weight)"."""
  name = constructor.__name__
  for known, each in _CONSTRUCTORS.items():
    if constructor is each:
      name = f"scores.{known}"
  needed = [
    each.name
    for each in inspect.signature(constructor).parameters.values()
    if each.default is each.empty
  ]
  return f"{name}({', '.join(needed)})"
