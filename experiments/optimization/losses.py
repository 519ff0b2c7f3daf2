"""Cross-entropy over a vocabulary, without an array of all logits.

Axes: B batch, T target, t tokens of a chunk, R features, V vocabulary.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from experiments.data.batch import PAD
from experiments.distributed import sharding
from experiments.distributed.mesh import ROWS
from experiments.models.layers.affine import Affine

# Number of logits of a chunk: fits into caches, and occupies every core.
_CHUNK_NUMBERS = 1 << 21


def cross_entropy(
  features: jax.Array,
  readout: Affine,
  labels: jax.Array,
  *,
  label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Maps features [B, T, R] to losses in nats [B, T] and hits [B, T]."""
  _check(features, readout, labels)
  chunks = _chunks(features, labels, readout.kernel.shape[1])

  def score(chunk):
    part, words = chunk
    loss, hit, _ = _of_chunk(part, words, readout, label_smoothing)
    return loss, hit

  result = jax.lax.map(score, chunks)
  return jax.tree.map(lambda x: _joined(x, labels.shape[1]), result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def total_cross_entropy(
  features: jax.Array,
  readout: Affine,
  labels: jax.Array,
  label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns the sums of `cross_entropy`, differentiable in reverse mode."""
  losses, hits = cross_entropy(
    features, readout, labels, label_smoothing=label_smoothing
  )
  return losses.sum(), hits.sum()


def sharded_cross_entropy(
  features: jax.Array,
  readout: Affine,
  labels: jax.Array,
  label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Returns `total_cross_entropy`; each device sums its own shard first."""
  rows = sharding.num_shards(*ROWS)
  tokens = sharding.num_shards("sequence")

  def total(features, labels):
    return total_cross_entropy(features, readout, labels, label_smoothing)

  if rows == tokens == 1:
    return total(features, labels)
  # Otherwise devices would gather it for each chunk.
  readout = readout._replace(kernel=sharding.gathered(readout.kernel))

  def cut(array):
    size, length, *rest = array.shape
    return array.reshape(rows, size // rows, tokens, length // tokens, *rest)

  shares = jax.vmap(jax.vmap(total, in_axes=1))(cut(features), cut(labels))
  return jax.tree.map(jnp.sum, shares)


def _total_and_gradient(features, readout, labels, label_smoothing):
  """Losses, and gradients for a cotangent of 1, chunk by chunk."""
  _check(features, readout, labels)
  wide = jnp.promote_types(features.dtype, jnp.float32)

  def add(total, chunk):
    # One axis of tokens: with two, XLA's GPU compiler finds no tiles for the
    # product with the replaced features if their sizes are no powers of two.
    part, words = (each.reshape(1, -1, *each.shape[2:]) for each in chunk)
    # Zero times NaN is NaN: features at PAD must not reach the product.
    part = jnp.where((words != PAD)[..., None], part, 0)
    loss, hit, probs = _of_chunk(part, words, readout, label_smoothing)
    errors = _errors(probs, words, label_smoothing)
    bias = None if readout.bias is None else errors.sum((0, 1))
    errors = errors.astype(part.dtype)
    kernel = jnp.einsum(
      "btr,btv->rv", part, errors, preferred_element_type=wide
    )
    sums = (loss.sum(), hit.sum(), Affine(kernel, bias))
    by_part = errors @ readout.kernel.T
    return jax.tree.map(jnp.add, total, sums), by_part.reshape(chunk[0].shape)

  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide), readout)
  start = (jnp.zeros((), wide), jnp.zeros((), int), zeros)
  chunks = _chunks(features, labels, readout.kernel.shape[1])
  (loss, hits, by_readout), by_part = jax.lax.scan(add, start, chunks)
  by_readout = jax.tree.map(
    lambda total, leaf: total.astype(leaf.dtype), by_readout, readout
  )
  return (loss, hits), (_joined(by_part, labels.shape[1]), by_readout)


def _scaled(label_smoothing, gradients, cotangents):
  """The gradients times the cotangent of the loss; hits have none."""
  del label_smoothing
  scale, _ = cotangents
  scaled = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
  return (*scaled, None)


total_cross_entropy.defvjp(_total_and_gradient, _scaled)


def _of_chunk(part, labels, readout: Affine, label_smoothing):
  """Losses [B, t], hits [B, t] and the softmax [B, t, V] of [B, t, R]."""
  logits = readout(part)
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  largest = logits.max(-1, keepdims=True)
  exponentials = jnp.exp(logits - largest)
  total = exponentials.sum(-1, keepdims=True)
  chosen = jnp.take_along_axis(logits, labels[..., None], -1)
  loss = (largest + jnp.log(total) - (1 - label_smoothing) * chosen)[..., 0]
  # See Szegedy et al., 2015, section 7 (https://arxiv.org/abs/1512.00567).
  if label_smoothing:
    loss = loss - label_smoothing * logits.mean(-1)
  real = labels != PAD
  hits = real & (chosen == largest)[..., 0]
  return jnp.where(real, loss, 0), hits, exponentials / total


def _errors(probs, labels, label_smoothing):
  """The derivative of the loss by the logits: softmax minus target."""
  size = probs.shape[-1]
  is_label = jnp.arange(size)[None, None] == labels[..., None]
  target = jnp.where(is_label, 1 - label_smoothing, 0)
  errors = probs - target - label_smoothing / size
  return jnp.where((labels != PAD)[..., None], errors, 0)


def _chunks(features, labels, vocabulary_size):
  """Splits [B, T, ...] into [chunks, B, t, ...], padded with PAD."""
  # Chunks divide the time axis: those of the batch would move examples to other
  # devices.
  batch_size, length = labels.shape
  rows = max(_CHUNK_NUMBERS // vocabulary_size, 64)
  size = min(length, max(rows // batch_size, 1))

  def cut(array):
    fill = [(0, 0), (0, -length % size)] + [(0, 0)] * (array.ndim - 2)
    array = jnp.pad(array, fill)
    shape = (batch_size, array.shape[1] // size, size, *array.shape[2:])
    return jnp.moveaxis(array.reshape(shape), 1, 0)

  return cut(features), cut(labels)


def _joined(chunks, length: int):
  """Joins [chunks, B, t, ...] to [B, T, ...]."""
  array = jnp.moveaxis(chunks, 0, 1)
  return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :length]


def _check(features, readout, labels) -> None:
  chex.assert_shape(features, (*labels.shape, None), custom_message="features")
  chex.assert_shape(
    readout.kernel, (features.shape[-1], None), custom_message="kernel"
  )
  if readout.bias is not None:
    chex.assert_shape(
      readout.bias, (readout.kernel.shape[1],), custom_message="bias"
    )
