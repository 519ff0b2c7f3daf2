"""The parameters of multi-head attention: projections and a score."""

import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from attention.checks import check_positive, check_tokens
from attention.dispatch import ImplementationLike
from attention.grouped_query import Grouping
from attention.heads import combine_heads, project_heads
from attention.modules.learned_scores import LearnedScore
from attention.modules.mesh_axes import MeshAxes
from attention.positions import rotary
from attention.scores import Score, with_mapped_keys


class KeyValue(NamedTuple):
  """Keys and values of a memory, projected to heads and mapped by the score.

  Made by `MultiHeadAttention.project`; what the axes between the leading ones
  and the positions are is the module's affair.
  """

  key: jax.Array
  value: jax.Array


class ProjectionWeights(nn.Module):
  """The kernel and the bias of a projection between groups of axes."""

  use_bias: bool
  kernel_init: Callable
  bias_init: Callable
  param_dtype: DTypeLike

  @nn.compact
  def __call__(self, inputs: tuple[int, ...], outputs: tuple[int, ...]):
    """A kernel [*inputs, *outputs], and a bias [*outputs] or None."""

    def initialize(rng, shape, dtype):
      # Initialisers know matrices: fan-in is all inputs, fan-out all outputs.
      matrix = (math.prod(inputs), math.prod(outputs))
      return jnp.reshape(self.kernel_init(rng, matrix, dtype), shape)

    shape = (*inputs, *outputs)
    kernel = self.param("kernel", initialize, shape, self.param_dtype)
    if not self.use_bias:
      return kernel, None
    return kernel, self.param("bias", self.bias_init, outputs, self.param_dtype)


class HeadProjections(nn.Module):
  """What `MultiHeadAttention` is made of; its docstring has the attributes."""

  num_heads: int
  head_size: int | None = None
  num_key_value_heads: int | None = None
  features: int | None = None
  score: str | Score | Callable = "scaled_dot"
  rotary: bool = False
  use_bias: bool = True
  dropout_rate: float = 0.0
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  bias_init: Callable = nn.initializers.zeros
  implementation: ImplementationLike = None
  mesh_axes: MeshAxes | None = None

  def setup(self):
    """Declares the parameters; the inputs give them their shapes."""
    names = ("num_heads", "head_size", "num_key_value_heads", "features")
    check_positive(**{name: getattr(self, name) for name in names})
    memory_heads = self.num_key_value_heads
    self.grouping = Grouping(
      self.num_heads, self.num_heads if memory_heads is None else memory_heads
    )
    weights = (
      self.use_bias,
      self.kernel_init,
      self.bias_init,
      self.param_dtype,
    )
    self.query_projection = ProjectionWeights(*weights)
    self.key_projection = ProjectionWeights(*weights)
    self.value_projection = ProjectionWeights(*weights)
    self.output_projection = ProjectionWeights(*weights)
    self.learned_score = LearnedScore(
      self.score,
      num_heads=self.num_heads,
      num_key_value_heads=self.grouping.num_key_value_heads,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )

  def _head_size(self, query) -> int:
    check_tokens(query=query)
    if self.head_size is not None:
      return self.head_size
    features = query.shape[-1] if self.features is None else self.features
    if features % self.num_heads:
      raise ValueError(
        f"{features} features do not divide into num_heads={self.num_heads} "
        "heads; set head_size"
      )
    return features // self.num_heads

  def score_and_query(self, query, offset):
    """The score for mapped keys, and the query's heads to go with it."""
    size = self._head_size(query)
    heads = self._heads(
      self.query_projection, query, self.num_heads, size, "query"
    )
    score = self.grouping.score(self.learned_score(size, size))
    heads = self.grouping.query(self._rotated(heads, offset))
    return with_mapped_keys(score), heads

  def memory(self, keys, values, size, offset) -> KeyValue:
    """Keys and values as heads, the keys mapped by the score."""
    values = keys if values is None else values
    check_tokens(key=keys, value=values)
    key = self.mapped_keys(keys, size, offset)
    count = self.grouping.num_key_value_heads
    value = self._heads(self.value_projection, values, count, size, "value")
    return KeyValue(key, self.grouping.memory(value))

  def mapped_keys(self, keys, size, offset):
    """Keys as heads, mapped by the score."""
    check_tokens(key=keys)
    count = self.grouping.num_key_value_heads
    key = self._heads(self.key_projection, keys, count, size, "key")
    score = self.grouping.score(self.learned_score(size, size))
    return score.map_key(self.grouping.memory(self._rotated(key, offset)))

  def _heads(self, projection, inputs, count, size, name):
    kernel, bias = projection((inputs.shape[-1],), (count, size))
    inputs, kernel, bias = promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    return project_heads(inputs, kernel, bias, name=f"{name}_weight")

  def _rotated(self, heads, offset):
    if not self.rotary:
      return heads
    return rotary(heads, offset + self._positions(heads.shape[-2]))

  def _positions(self, length):
    if self.mesh_axes is None:
      return jnp.arange(length)
    return self.mesh_axes.positions(length)

  def combined(self, context, features: int) -> jax.Array:
    """The output [..., T, features] of contexts laid out as queries are."""
    context = self.grouping.heads(context)
    sizes = (self.num_heads, context.shape[-1])
    kernel, bias = self.output_projection(sizes, (features,))
    return combine_heads(
      *promote_dtype(context, kernel, bias, dtype=self.dtype)
    )
