"""The entry points: `attend` and `attention_weights`."""

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from attention.arrays.matmul import matmul_precision
from attention.dispatch import ImplementationLike, dispatch, dispatch_weights
from attention.dropout import make_dropout
from attention.scores import scaled_dot_score
from attention.types import (
  BiasLike,
  ContextAndLse,
  Key,
  MaskLike,
  NormalizerLike,
  Query,
  ScoreLike,
  Value,
  Weights,
)


def attend(
  query: Query,
  key: Key,
  value: Value,
  *,
  score: ScoreLike = scaled_dot_score,
  mask: MaskLike | None = None,
  bias: BiasLike | None = None,
  normalizer: NormalizerLike | None = None,
  dropout_rate: float = 0.0,
  rng: jax.Array | None = None,
  implementation: ImplementationLike = None,
  return_lse: bool = False,
  precision: PrecisionLike = None,
) -> ContextAndLse:
  """Attention: each query's average of the values, weighted by its scores.

  With weights = softmax_j(score(query_i, key_j) + bias(i, j) where mask(i, j)),
  the context is weights @ value. See "Neural Machine Translation by Jointly
  Learning to Align and Translate", Bahdanau et al., 2014, equations 5 and 6
  (https://arxiv.org/abs/1409.0473), and "Attention Is All You Need", Vaswani
  et al., 2017, equation 1 (https://arxiv.org/abs/1706.03762).

  A query that may attend to no key has context 0 and zero gradients; its lse is
  -inf, or the logit of a sink.
  A masked key has no effect, even if it holds NaN or infinity. Zeros replace
  such tokens, so the score must have finite derivatives for tokens of zeros.

  Args:
    query: [..., T, Dq]. Heads are a leading axis, [B, H, T, D].
    key: [..., S, Dk]; leading axes broadcast, so grouped queries are
      [B, K, G, T, D] against [B, K, 1, S, D].
    value: [..., S, E].
    score: any callable (query, key) -> scores [..., T, S]. Arrays that it
      closes over receive gradients. The score of a pair may depend on its query
      and its key only; `attention.scores.positional` makes a score of a
      function that reads positions. `attention.scores` has many scores.
    mask: True where a query may attend to a key, from `attention.masks`, or a
      boolean array that broadcasts to [..., T, S]; None means everywhere.
    bias: added to the scores, from `attention.biases`, or an array that
      broadcasts to [..., T, S].
    normalizer: the function from a row of scores to its weights, from
      `attention.normalizers`, or any function of scores [..., T, S], -inf where
      hidden, that treats each row alone; None is softmax.
    dropout_rate: the probability to drop a weight.
    rng: a random key, needed if `dropout_rate` is positive.
    implementation: None (chosen by size and platform), "reference" (the dense
      formula), "blockwise" (tile by tile, in O(T + S) memory), "cudnn" (cuDNN's
      kernel on a GPU, which None chooses for dot products in half precision) or
      "pallas" (kernels for TPUs and Hopper GPUs), of which the last two compute
      other derivatives than the gradient tile by tile; or any object that
      follows the protocol `attention.implementations.Implementation`, for
      instance `Blockwise(query_block=..., key_block=...)` for other tile sizes.
    return_lse: whether to return the log-sum-exp of the scores too, which
      `attention.merge` needs.
    precision: the precision of all matrix products and of their derivatives, as
      in `jax.numpy.matmul`; None is `jax.default_matmul_precision`. Sums, such
      as those of the softmax and the additive score, are float32 at least.

  Returns:
    The context [..., T, E] in the query's dtype. With `return_lse` a pair of
    the context and the lse [..., T], float32 (float64 if an input is float64).

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    TypeError: if an argument is of a wrong type; the message names it.
    ValueError: if a choice is unknown, `mask` or `bias` does not broadcast, or
      `score` is a function that computes positions or reads other tokens.
    NotImplementedError: if the implementation cannot serve the request.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attend, masks
    >>> tokens = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> attend(tokens, tokens, tokens, mask=masks.causal())
    Array([[1.  , 0.  ],
           [0.33, 0.67]], dtype=float32)
  """
  with matmul_precision(precision):
    context, lse = dispatch(
      query,
      key,
      value,
      score=score,
      mask=mask,
      bias=bias,
      normalizer=normalizer,
      dropout=make_dropout(dropout_rate, rng),
      implementation=implementation,
      return_lse=return_lse,
    )
  return (context, lse) if return_lse else context


def attention_weights(
  query: Query,
  key: Key,
  *,
  score: ScoreLike = scaled_dot_score,
  mask: MaskLike | None = None,
  bias: BiasLike | None = None,
  normalizer: NormalizerLike | None = None,
  precision: PrecisionLike = None,
) -> Weights:
  """The attention weights, with which `attend` averages the values.

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk]; leading axes broadcast.
    score: as in `attend`.
    mask: as in `attend`.
    bias: as in `attend`.
    normalizer: as in `attend`.
    precision: as in `attend`.

  Returns:
    [..., T, S] in the query's dtype. With softmax each row sums to 1. The
    weights of a query that may attend to no key are 0.

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    TypeError: if an argument is of a wrong type; the message names it.
    ValueError: if a choice is unknown, or `mask` or `bias` does not broadcast.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attention_weights
    >>> attention_weights(jnp.zeros((1, 4)), jnp.ones((2, 4)))
    Array([[0.5, 0.5]], dtype=float32)
  """
  with matmul_precision(precision):
    weights = dispatch_weights(
      query, key, score=score, mask=mask, bias=bias, normalizer=normalizer
    )
  return weights.astype(jnp.result_type(query))
