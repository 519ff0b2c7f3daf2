"""Multi-head attention as a Flax Linen module."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention import cache as caches
from attention import masks
from attention.api import attention_weights
from attention.biases import as_bias
from attention.dropout import make_dropout
from attention.modules.head_projections import HeadProjections, KeyValue
from attention.modules.mesh_axes import MeshAxes


class MultiHeadAttention(HeadProjections):
  """Multi-head attention with any score, mask and bias.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.2.2
  (https://arxiv.org/abs/1706.03762).

  Attributes:
    num_heads: H.
    head_size: D of a head; None divides `features`, or the query's number of
      features, by the number of heads.
    num_key_value_heads: K, divides H; None means H.
    features: of the output; None means the query's.
    score: a name (`attention.modules.SCORE_NAMES`), a score or a callable; a
      named score has parameters of its own for each head.
    rotary: whether to rotate queries and keys by their positions.
    use_bias: whether projections have biases.
    dropout_rate: the probability to drop a weight; needs the rng "dropout".
    implementation: as in `attend`.
    mesh_axes: of the mesh, which share heads and tokens; None leaves that to
      XLA. Where tokens are shared, `decode` and `weights` need a module
      without: `module.clone(mesh_axes=None)`.
    dtype: of the computation; None takes the inputs' and parameters'.
    param_dtype: the dtype parameters are stored in.
    kernel_init: of the projections, given matrices [inputs, outputs].
    bias_init: of the projections' biases.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from attention import masks
    >>> tokens = jnp.ones((2, 5, 8))
    >>> module = MultiHeadAttention(num_heads=4, num_key_value_heads=2)
    >>> outputs, variables = module.init_with_output(
    ...   jax.random.key(0), tokens, mask=masks.causal()
    ... )
    >>> outputs.shape
    (2, 5, 8)
  """

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array | None = None,
    value: jax.Array | None = None,
    *,
    mask: Any = None,
    bias: Any = None,
    deterministic: bool = True,
  ) -> jax.Array:
    """Attention of the query's tokens to the key's, or to each other.

    Args:
      query: [..., T, Dq].
      key: [..., S, Dk]; None means the query: self-attention.
      value: [..., S, Dv]; None means the key.
      mask: as in `attend`, for scores [..., H, T, S].
      bias: as in `attend`, for scores [..., H, T, S].
      deterministic: whether to leave dropout out.

    Returns:
      [..., T, features].

    Raises:
      AssertionError: if the shapes do not fit; the message names the argument.
      ValueError: as in `attend`, or if a choice of the module is impossible.
    """
    key = query if key is None else key
    memory = self.memory(key, value, self._head_size(query), 0)
    return self.attend_projected(
      query, memory, mask=mask, bias=bias, deterministic=deterministic
    )

  def project(
    self,
    inputs: jax.Array,
    values: jax.Array | None = None,
    *,
    offset: int | jax.Array = 0,
  ) -> KeyValue:
    """A memory's keys and values, projected once to be attended to often.

    Give the module a `head_size` where the memory and the queries have
    different numbers of features.

    Args:
      inputs: [..., S, Dk].
      values: [..., S, Dv]; None means the inputs.
      offset: the position of the first token, for rotary positions.

    Returns:
      What `attend_projected` and `weights_projected` take.
    """
    return self.memory(inputs, values, self._head_size(inputs), offset)

  def attend_projected(
    self,
    query: jax.Array,
    key_value: KeyValue,
    *,
    mask: Any = None,
    bias: Any = None,
    query_offset: int | jax.Array = 0,
    deterministic: bool = True,
  ) -> jax.Array:
    """Attention to a memory that `project` made.

    Args:
      query: [..., T, Dq].
      key_value: the memory.
      mask: as in `attend`, for scores [..., H, T, S].
      bias: as in `attend`, for scores [..., H, T, S].
      query_offset: the position of the first query, for rotary positions; it
        does not move the mask or the bias, their method `shifted` does.
      deterministic: whether to leave dropout out.

    Returns:
      [..., T, features].
    """
    score, heads = self.score_and_query(query, query_offset)
    rate = 0.0 if deterministic else self.dropout_rate
    rng = self.make_rng("dropout") if rate else None
    context = (self.mesh_axes or MeshAxes()).dispatch(
      heads,
      *key_value,
      score=score,
      mask=self.grouping.mask(mask),
      bias=self.grouping.bias(bias),
      dropout=make_dropout(rate, rng),
      implementation=self.implementation,
      head_axes=1 if self.grouping.trivial else 2,
      score_has_heads=isinstance(self.score, str),
    )
    features = query.shape[-1] if self.features is None else self.features
    return self.combined(context, features)

  def weights(
    self,
    query: jax.Array,
    key: jax.Array | None = None,
    *,
    mask: Any = None,
    bias: Any = None,
  ) -> jax.Array:
    """The distributions over the keys, [..., H, T, S], without dropout."""
    key = query if key is None else key
    heads = self.mapped_keys(key, self._head_size(query), 0)
    memory = KeyValue(heads, heads)
    return self.weights_projected(query, memory, mask=mask, bias=bias)

  def weights_projected(
    self,
    query: jax.Array,
    key_value: KeyValue,
    *,
    mask: Any = None,
    bias: Any = None,
    query_offset: int | jax.Array = 0,
  ) -> jax.Array:
    """The distributions over a memory that `project` made, [..., H, T, S]."""
    self._check_alone("weights")
    score, heads = self.score_and_query(query, query_offset)
    weights = attention_weights(
      heads,
      key_value.key,
      score=score,
      mask=self.grouping.mask(mask),
      bias=self.grouping.bias(bias),
    )
    return self.grouping.heads(weights)

  def init_cache(
    self,
    leading_shape: Sequence[int],
    max_length: int,
    dtype: DTypeLike | None = None,
  ) -> caches.Cache:
    """An empty cache for `decode`, of a module that has parameters.

    Args:
      leading_shape: the leading axes of the inputs, for instance (B,).
      max_length: how many tokens fit.
      dtype: of keys and values; None means what the module computes them in,
        for additive scores float32 keys.

    Returns:
      A cache.

    Raises:
      ValueError: if the module has no parameters yet.
    """
    if not self.key_projection.has_variable("params", "kernel"):
      raise ValueError("init_cache needs parameters: call it through `apply`")
    kernel: jax.Array = self.key_projection.get_variable("params", "kernel")
    token = jax.ShapeDtypeStruct(
      (*leading_shape, max_length, kernel.shape[0]),
      dtype or self.dtype or kernel.dtype,
    )
    memory = jax.eval_shape(
      lambda token: self.memory(token, None, kernel.shape[-1], 0), token
    )
    key, value = (
      jnp.zeros(array.shape, dtype or array.dtype) for array in memory
    )
    return caches.Cache(key, value, jnp.zeros((), jnp.int32))

  def decode(
    self,
    inputs: jax.Array,
    cache: caches.Cache,
    *,
    mask: Any = None,
    bias: Any = None,
  ) -> tuple[jax.Array, caches.Cache]:
    """Causal self-attention of new tokens to themselves and those before.

    Equal to `__call__` on the whole sequence with a causal mask, at its last
    positions.

    Args:
      inputs: [..., t, D], the next tokens, one or more.
      cache: from `init_cache` or the last call.
      mask: besides the causal one, for scores [..., H, max_length,
        max_length]: rows are positions in the sequence, of arrays too.
      bias: likewise.

    Returns:
      Outputs [..., t, features] and the cache with the new tokens.

    Raises:
      ValueError: if the tokens do not fit into the cache.
    """
    self._check_alone("decode")
    start = cache.length
    new = self.project(inputs, offset=start)
    cache = caches.append(cache, new.key, new.value)
    seen = masks.causal() if mask is None else masks.causal() & mask
    outputs = self.attend_projected(
      inputs,
      KeyValue(cache.key, cache.value),
      mask=seen.shifted(start),
      bias=None if bias is None else as_bias(bias).shifted(start),
      query_offset=start,
    )
    return outputs, cache

  def _check_alone(self, method: str) -> None:
    if self.mesh_axes is not None and self.mesh_axes.sequence is not None:
      raise NotImplementedError(
        f"{method} needs all tokens, which mesh_axes.sequence"
        f" {self.mesh_axes.sequence!r} shares; use"
        " module.clone(mesh_axes=None)"
      )
