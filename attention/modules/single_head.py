"""Attention with one head and any score, for RNN decoders."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from attention.api import attend, attention_weights
from attention.checks import check_tokens
from attention.dispatch import ImplementationLike
from attention.modules.learned_normalizers import LearnedNormalizer
from attention.modules.learned_scores import learned_score
from attention.normalizers import Normalizer
from attention.scores import Score
from attention.types import BiasLike, MaskLike


class Attention(nn.Module):
  """Single-head attention with the parameters of a score, no projections.

  See "Neural Machine Translation by Jointly Learning to Align and Translate",
  Bahdanau et al., 2014 (https://arxiv.org/abs/1409.0473), and "Effective
  Approaches to Attention-based Neural Machine Translation", Luong et al., 2015
  (https://arxiv.org/abs/1508.04025).

  Attributes:
    score: a name (`attention.modules.SCORE_NAMES` or `POSITIONAL_SCORE_NAMES`),
      or a score or callable, used unchanged.
    hidden_size: A of the additive and the concat score; None means the key's
      number of features.
    score_options: options of a score by the names of `LearnedScore`,
      for instance `{"window": 5}`; a named score ignores those of others.
    normalizer: a name (`attention.modules.NORMALIZER_NAMES`), or as in
      `attend`.
    dropout_rate: the probability to drop a weight in calls with
      `deterministic=False`, which need the rng "dropout".
    implementation: as in `attend`.
    precision: as in `attend`.
    dtype: the dtype of the computation; None means that of the inputs and
      parameters.
    param_dtype: the dtype in which parameters are stored.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> decoder_state, encoder_states = jnp.ones((2, 1, 8)), jnp.ones((2, 5, 6))
    >>> module = Attention("additive", hidden_size=16)
    >>> context, variables = module.init_with_output(
    ...   jax.random.key(0), decoder_state, encoder_states
    ... )
    >>> context.shape
    (2, 1, 6)

    For `lax.scan`, map the encoder states once and use the pure function:

    >>> from attention import attend
    >>> from attention.scores import with_mapped_keys
    >>> score = module.apply(variables, 8, 6, method=module.bound_score)
    >>> memory = score.map_key(encoder_states)
    >>> attend(
    ...   decoder_state, memory, encoder_states, score=with_mapped_keys(score)
    ... ).shape
    (2, 1, 6)
  """

  score: str | Score | Callable = "additive"
  hidden_size: int | None = None
  score_options: Mapping[str, Any] | None = None
  normalizer: str | Normalizer | Callable | None = None
  dropout_rate: float = 0.0
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  implementation: ImplementationLike = None
  precision: PrecisionLike = None

  def setup(self):
    """Declares the score and the normalizer."""
    self.learned_score = learned_score(
      self.score,
      self.score_options,
      hidden_size=self.hidden_size,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    self.learned_normalizer = LearnedNormalizer(
      self.normalizer, param_dtype=self.param_dtype
    )

  def bound_score(self, query_size: int, key_size: int) -> Score:
    """The score with its parameters bound, for pure functions."""
    return self.learned_score(query_size, key_size)

  def bound_normalizer(self) -> Normalizer:
    """The normalizer with its parameters bound, for pure functions."""
    return self.learned_normalizer()

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None = None,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    deterministic: bool = True,
  ) -> jax.Array:
    """`attend` with the score of this module.

    Args:
      query: [..., T, Dq].
      key: [..., S, Dk].
      value: [..., S, E]; None means the key.
      mask: as in `attend`.
      bias: as in `attend`.
      deterministic: whether to disable dropout; not traced, so apply
        `nn.remat` to a module that sets it.

    Returns:
      [..., T, E].
    """
    check_tokens(query=query, key=key)
    value = key if value is None else value
    query, key, value = promote_dtype(query, key, value, dtype=self.dtype)
    rate = 0.0 if deterministic else self.dropout_rate
    return attend(
      query,
      key,
      value,
      score=self.bound_score(query.shape[-1], key.shape[-1]),
      mask=mask,
      bias=bias,
      normalizer=self.bound_normalizer(),
      dropout_rate=rate,
      rng=self.make_rng("dropout") if rate else None,
      implementation=self.implementation,
      precision=self.precision,
    )

  def weights(
    self,
    query: jax.Array,
    key: jax.Array,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
  ) -> jax.Array:
    """The attention weights [..., T, S], without dropout."""
    check_tokens(query=query, key=key)
    query, key = promote_dtype(query, key, dtype=self.dtype)
    score = self.bound_score(query.shape[-1], key.shape[-1])
    return attention_weights(
      query,
      key,
      score=score,
      mask=mask,
      bias=bias,
      normalizer=self.bound_normalizer(),
      precision=self.precision,
    )
