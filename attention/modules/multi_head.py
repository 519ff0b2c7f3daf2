"""Multi-head attention as a Flax Linen module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from attention.arrays import axes
from attention.arrays.matmul import precision_name
from attention.cache import Cache, check_cache
from attention.checks import (
  check_examples,
  check_positive,
  check_sizes,
  check_tokens,
)
from attention.dispatch import ImplementationLike
from attention.dropout import make_dropout
from attention.modules.learned_normalizers import LearnedNormalizer
from attention.modules.learned_scores import learned_score
from attention.modules.projection_weights import ProjectionWeights
from attention.multi_head.bound import MultiHead
from attention.multi_head.grouped_query import Grouping, KeyValue
from attention.multi_head.mesh_axes import MeshAxes, as_mesh_axes
from attention.multi_head.projections import Projection
from attention.normalizers import Normalizer
from attention.positional.position_arrays import checked_offsets
from attention.positions import RotaryOptions
from attention.scores import Score
from attention.types import BiasLike, MaskLike


class MultiHeadAttention(nn.Module):
  """`attention.multi_head_attention` as a module that owns the parameters.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.2.2
  (https://arxiv.org/abs/1706.03762).

  Attributes:
    num_heads: H, the number of heads.
    head_size: D; None means the number of output features divided by H.
    num_key_value_heads: K, which divides H; None means H.
    features: the number of output features; None means that of the query.
    score: a name (`attention.modules.SCORE_NAMES` or `POSITIONAL_SCORE_NAMES`),
      a score or a callable; a named score has parameters for each head.
    score_options: options of a score by the names of `LearnedScore`, for
      instance `{"max_distance": 32}`; a named score ignores those of others.
    normalizer: a name (`attention.modules.NORMALIZER_NAMES`), or as in
      `attend`; a named one has parameters for each head.
    rotary: whether to rotate queries and keys by their positions, or the
      `attention.positions.RotaryOptions` to do so.
    use_bias: whether projections have biases.
    dropout_rate: the probability to drop a weight in calls with
      `deterministic=False`, which need the rng "dropout".
    dtype: the dtype of the computation; None means that of the inputs and
      parameters.
    param_dtype: the dtype in which parameters are stored.
    kernel_init: initializes a projection's weight, as [inputs, outputs].
    bias_init: initializes a projection's bias.
    implementation: as in `attend`.
    precision: as in `attend`, also of the projections.
    mesh_axes: the mesh axes that shard heads and tokens; None leaves sharding
      to XLA. If tokens are sharded, `decode` and `weights` need
      `module.clone(mesh_axes=None)`.

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

  num_heads: int
  head_size: int | None = None
  num_key_value_heads: int | None = None
  features: int | None = None
  score: str | Score | Callable = "scaled_dot"
  score_options: Mapping[str, Any] | None = None
  normalizer: str | Normalizer | Callable | None = None
  rotary: bool | RotaryOptions = False
  use_bias: bool = True
  dropout_rate: float = 0.0
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  bias_init: Callable = nn.initializers.zeros
  implementation: ImplementationLike = None
  mesh_axes: MeshAxes | None = None
  precision: PrecisionLike = None

  def setup(self):
    """Declares the projections, the score and the normalizer."""
    names = ("num_heads", "head_size", "num_key_value_heads", "features")
    check_positive(**{name: getattr(self, name) for name in names})
    memory_heads = self.num_key_value_heads
    self.grouping = Grouping(
      self.num_heads, self.num_heads if memory_heads is None else memory_heads
    )
    weights = self.use_bias, self.kernel_init, self.bias_init, self.param_dtype
    self.query_projection = ProjectionWeights(*weights)
    self.key_projection = ProjectionWeights(*weights)
    self.value_projection = ProjectionWeights(*weights)
    self.output_projection = ProjectionWeights(*weights)
    self.learned_score = learned_score(
      self.score,
      self.score_options,
      num_heads=self.num_heads,
      num_key_value_heads=self.grouping.num_key_value_heads,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    self.learned_normalizer = LearnedNormalizer(
      self.normalizer, self.num_heads, self.param_dtype
    )

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array | None = None,
    value: jax.Array | None = None,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    deterministic: bool = True,
  ) -> jax.Array:
    """`multi_head_attention` with this module's parameters.

    Args:
      query: [..., T, Dq].
      key: [..., S, Dk]; None means the query: self-attention.
      value: [..., S, Dv]; None means the key.
      mask: as in `attend`, for scores [..., H, T, S].
      bias: as in `attend`, for scores [..., H, T, S].
      positions: [..., T] for `rotary`; None means 0 to T - 1.
      key_positions: [..., S]; None means `positions`.
      key_lengths: int [...], the numbers of keys without padding, of which the
        center of the score "local_p" is a share; None means S. It hides no key.
      deterministic: whether to disable dropout; not traced, so apply
        `nn.remat` to a module that sets it.

    Returns:
      [..., T, features].
    """
    key = query if key is None else key
    value = key if value is None else value
    layer, tokens = self._bound(key_lengths, query=query, key=key, value=value)
    options = {
      "mask": mask,
      "bias": bias,
      "positions": positions,
      "key_positions": key_positions,
      "dropout": self._dropout(deterministic),
    }
    return layer(*tokens, cache=None, **options)[0]

  def decode(
    self,
    inputs: jax.Array,
    cache: Cache,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    positions: jax.Array | None = None,
    lengths: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Causal self-attention of new tokens to earlier tokens and themselves.

    The outputs [..., t, features] for inputs [..., t, D] equal the last t of
    `__call__` on the whole sequence with a causal mask. The cache is from
    `init_cache` or the previous call; `mask` and `bias` are for scores
    [..., H, max_length, max_length]; `positions` [..., t] are for `rotary`, and
    `lengths` [...] for a cache with a length per example. See
    `multi_head_attention(cache=...)`.
    """
    check_cache(cache)
    layer, tokens = self._bound(query=inputs, key=inputs, value=inputs)
    return layer(
      *tokens,
      mask=mask,
      bias=bias,
      positions=positions,
      cache=cache,
      lengths=lengths,
      dropout=None,
    )

  def project(
    self,
    inputs: jax.Array,
    values: jax.Array | None = None,
    *,
    positions: jax.Array | None = None,
  ) -> KeyValue:
    """Projects the keys and values of a memory once, for many queries.

    The keys are projections of `inputs` [..., S, Dk], the values of `values`
    [..., S, Dv]; None means `inputs`.
    Set the module's `head_size` if the memory and the queries have different
    numbers of features. `positions` [..., S] are for `rotary`.
    """
    values = inputs if values is None else values
    layer, (key, value) = self._bound(key=inputs, value=values)
    return layer.project(key, value, positions=positions)

  def attend_projected(
    self,
    query: jax.Array,
    key_value: KeyValue,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    query_offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    deterministic: bool = True,
  ) -> jax.Array:
    """`__call__` for a memory that `project` has returned.

    `query_offset`, a number or [B], is the position of the first query, for
    `rotary`, where `positions` [..., T] replaces it, and for scores that depend
    on positions.
    Shift masks and biases with their method `shifted`. `key_lengths` are as in
    `__call__`.
    """
    layer, (query,) = self._bound(key_lengths, query=query)
    query_offset = checked_offsets("query_offset", query_offset, query)
    return layer.attend(
      query,
      key_value,
      mask=mask,
      bias=bias,
      dropout=self._dropout(deterministic),
      positions=_positions(layer, query, query_offset, positions),
      offset=query_offset,
    )

  def weights(
    self,
    query: jax.Array,
    key: jax.Array | None = None,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
  ) -> jax.Array:
    """The attention weights [..., H, T, S], without dropout."""
    key = query if key is None else key
    layer, (query, key) = self._bound(key_lengths, query=query, key=key)
    key_positions = positions if key_positions is None else key_positions
    key = layer.project_key(key, positions=key_positions)
    return layer.weights(query, key, mask=mask, bias=bias, positions=positions)

  def weights_projected(
    self,
    query: jax.Array,
    key_value: KeyValue,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    query_offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
  ) -> jax.Array:
    """The attention weights [..., H, T, S] over a memory from `project`."""
    layer, (query,) = self._bound(key_lengths, query=query)
    query_offset = checked_offsets("query_offset", query_offset, query)
    positions = _positions(layer, query, query_offset, positions)
    return layer.weights(
      query,
      key_value.key,
      mask=mask,
      bias=bias,
      positions=positions,
      offset=query_offset,
    )

  def init_cache(
    self,
    leading_shape: Sequence[int],
    max_length: int,
    dtype: DTypeLike | None = None,
    *,
    ragged: bool = False,
    rolling: bool = False,
  ) -> Cache:
    """An empty cache for `decode`; the module must have parameters.

    `leading_shape` are the leading axes of the inputs, for instance (B,). A
    dtype of None means the dtype of the computation, and float32 for the keys
    of additive scores. A `ragged` cache has a length per example; a `rolling`
    one keeps the last `max_length` tokens. Under `jax.jit`, tokens past the end
    of another cache raise no error, see `attention.cache.append`.
    """
    check_positive(max_length=max_length)
    check_sizes(leading_shape=leading_shape)
    is_bound = self.scope is not None
    if not is_bound or not self.key_projection.has_variable("params", "kernel"):
      raise ValueError("init_cache needs parameters: call it through `apply`")
    kernel: jax.Array = self.key_projection.get_variable("params", "kernel")
    tokens = jax.ShapeDtypeStruct(
      (*leading_shape, max_length, kernel.shape[0]),
      dtype or self.dtype or kernel.dtype,
    )
    memory = jax.eval_shape(self.project, tokens)
    key, value = (
      jnp.zeros(array.shape, dtype or array.dtype) for array in memory
    )
    length = jnp.zeros(leading_shape if ragged else (), jnp.int32)
    return Cache(key, value, length, rolling)

  def _dropout(self, deterministic):
    rate = 0.0 if deterministic else self.dropout_rate
    return make_dropout(rate, self.make_rng("dropout") if rate else None)

  def _bound(
    self, key_lengths=None, **tokens
  ) -> tuple[MultiHead, list[jax.Array]]:
    """The projections of tokens, and the tokens in the computation's dtype."""
    check_tokens(**tokens)
    size = self._head_size(next(iter(tokens.values())).shape[-1])
    projections, inputs = {}, []
    for name, array in tokens.items():
      own, features = getattr(self, f"{name}_projection"), array.shape[-1]
      memory_heads = self.grouping.num_key_value_heads
      heads = self.num_heads if name == "query" else memory_heads
      kernel, bias = own((features,), (heads, size))
      array, *weights = promote_dtype(array, kernel, bias, dtype=self.dtype)
      projections[name] = Projection(*weights)
      inputs.append(array)
    if "query" in tokens:
      features = self.features or tokens["query"].shape[-1]
      weights = self.output_projection((self.num_heads, size), (features,))
      weights = promote_dtype(*weights, dtype=self.dtype)
      projections["output"] = Projection(*weights)
    if key_lengths is not None:
      key_lengths = jnp.asarray(key_lengths)
      check_examples("key_lengths", key_lengths, inputs[-1])
      key_lengths = key_lengths[..., None]  # an axis of heads
    layer = MultiHead(
      projections,
      self.learned_score(size, size, key_lengths),
      self.learned_normalizer(),
      query_heads=(self.num_heads, size),
      rotary=self.rotary,
      mesh_axes=as_mesh_axes(self.mesh_axes),
      implementation=self.implementation,
      precision=precision_name(self.precision),
    )
    return layer, inputs

  def _head_size(self, input_features: int) -> int:
    if self.head_size is not None:
      return self.head_size
    features = self.features or input_features
    if features % self.num_heads:
      raise ValueError(
        f"num_heads={self.num_heads} does not divide {features} features; set "
        "head_size"
      )
    return features // self.num_heads


def _positions(layer: MultiHead, tokens, offset, positions):
  """`positions`, or those from `offset` on if they are None."""
  if positions is not None:
    return positions
  places = layer.mesh_axes.positions(tokens.shape[-2])
  starts, places = axes.aligned(jnp.expand_dims(offset, -1), places)
  return starts + places
