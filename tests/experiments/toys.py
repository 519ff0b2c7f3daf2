"""Models so small that every hypothesis can be counted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.config import Seq2SeqConfig, TransformerConfig
from experiments.data.batch import BOS, EOS, PAD
from experiments.models.rnn.seq2seq import Seq2Seq
from experiments.models.transformer.model import Transformer


class Lookup(nn.Module):
  """A model whose logits depend on the source and the whole hypothesis so far.

  It carries the hypothesis in a cache like a Transformer's, so logits are wrong
  if a search mixes up its beams. From step `breaks_at` on they are NaN.
  """

  vocabulary_size: int
  num_states: int = 97
  breaks_at: int = 1000

  def start(self, source, max_length):
    seen = jnp.zeros((source.shape[0], max_length), jnp.int32)
    return source[:, 0], (seen, jnp.zeros((), jnp.int32))

  @nn.compact
  def step(self, memory, carry, token):
    shape = (self.num_states, self.vocabulary_size)
    table = self.param("table", nn.initializers.normal(2.0), shape)
    seen, length = carry
    seen = jax.lax.dynamic_update_slice_in_dim(
      seen, token[:, None], length, axis=1
    )
    places = jnp.arange(seen.shape[1])[None]
    state = (memory + (seen * (places + 3) ** 2).sum(-1)) % self.num_states
    logits = jnp.asarray(table)[state]
    logits = jnp.where(length < self.breaks_at, logits, jnp.nan)
    return (seen, length + 1), logits, jnp.zeros((len(token), 1, 1))

  def logits(self, table, source, hypothesis):
    """The logits of `step` after a hypothesis, computed directly."""
    seen = [BOS, *hypothesis]
    weighted = sum(s * (i + 3) ** 2 for i, s in enumerate(seen))
    return table[(source[0] + weighted) % self.num_states]


def rnn(vocabulary_size):
  return make_rnn(
    vocabulary_size, vocabulary_size, order="bahdanau", input_feeding=True
  )


def make_rnn(
  source_vocabulary_size, target_vocabulary_size, *, dtype="float32", **options
):
  """A small RNN; `options` are fields of its config."""
  fields = {
    "embedding_size": 5,
    "hidden_size": 6,
    "attention_size": 6,
    "order": "luong",
  } | options
  return Seq2Seq(
    Seq2SeqConfig(**fields),
    source_vocabulary_size,
    target_vocabulary_size,
    max_length=9,
    dtype=dtype,
  )


def transformer(vocabulary_size):
  return make_transformer(vocabulary_size, vocabulary_size, decoder_layers=2)


def make_transformer(
  source_vocabulary_size,
  target_vocabulary_size,
  *,
  shared_vocabulary=True,
  dtype="float32",
  **options,
):
  """A small Transformer; `options` are fields of its config."""
  fields = {
    "model_size": 8,
    "feed_forward_size": 12,
    "num_heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "positions": "sinusoidal",
  } | options
  return Transformer(
    TransformerConfig(**fields),
    source_vocabulary_size,
    target_vocabulary_size,
    shared_vocabulary=shared_vocabulary,
    max_length=9,
    dtype=dtype,
  )


def random_parameters(model, source, target, scale=1.0, seed=0):
  """Parameters of the size of initial ones, without a compiled program.

  Unlike initial biases and gains, which are 0 and 1, all of them are random.
  """
  init = functools.partial(model.init, jax.random.key(0))
  shapes = jax.eval_shape(init, source, target)["params"]
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    spread = leaf.shape[0] ** -0.5 if leaf.ndim > 1 else 0.1
    values = rng.normal(0, spread, leaf.shape)
    is_gain = jax.tree_util.keystr(path).endswith("['scale']")
    return (scale * (values + is_gain)).astype(leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def log_softmax(logits):
  logits = np.asarray(logits, np.float64)
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def followed(model, params, source, hypotheses):
  """Log-probabilities [N] of given hypotheses [N, T] to one source [S]."""
  sources = jnp.broadcast_to(source, (len(hypotheses), len(source)))
  logits = jax.jit(model.apply)({"params": params}, sources, hypotheses)
  chosen = np.take_along_axis(
    log_softmax(logits), np.asarray(hypotheses)[..., None], -1
  )[..., 0]
  return np.where(hypotheses == PAD, 0, chosen).sum(-1)


def all_hypotheses(vocabulary_size, max_length):
  """Every hypothesis [N, T]: tokens that end with EOS or at `max_length`."""
  symbols = range(EOS + 1, vocabulary_size)
  hypotheses = list(itertools.product(symbols, repeat=max_length))
  for length in range(max_length):
    for words in itertools.product(symbols, repeat=length):
      padding = (PAD,) * (max_length - length - 1)
      hypotheses.append((*words, EOS, *padding))
  return np.array(hypotheses, np.int32)


def divisor(hypotheses, length_penalty):
  lengths = (np.asarray(hypotheses) != PAD).sum(-1)
  return ((5 + lengths) / 6) ** length_penalty
