"""Attention weights of decoded sequences, and their alignment error rate."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.data.batch import PAD, Array
from experiments.data.dataset import EvaluationSet
from experiments.data.gold_alignments import GoldAlignments
from experiments.decoding.batching import padded_batch
from experiments.experiment import Experiment
from experiments.models.attention_weights import (
  CROSS,
  DECODER,
  ENCODER,
  KINDS,
  attention_weights,
)

# Examples: enough for a rate to one percent. Decoding takes a step per token.
_NUM_ALIGNED = 256
_ONLY_HEAD = "attention"


@functools.partial(jax.jit, static_argnums=0, static_argnames="kinds")
def _weights(model, params, source, target, *, kinds: Sequence[str]):
  weights = attention_weights(model, params, source, target)
  return {kind: weights[kind] for kind in kinds if kind in weights}


def target_attention_weights(
  model: nn.Module, params: Any, source: Array, target: Array
) -> jax.Array:
  """Returns the weights [N, L, H, T, S] of targets."""
  weights = _weights(model, params, source, target, kinds=(CROSS,)).get(CROSS)
  if weights is None:  # an RNN without attention
    return jnp.zeros((len(source), 1, 1, target.shape[1], source.shape[1]))
  return weights


def unpadded_weights(
  model: nn.Module, params: Any, source: np.ndarray, target: np.ndarray
) -> list[np.ndarray]:
  """Returns N arrays [L, H, t, s], the attention weights without padding."""
  # Few widths are compiled.
  source, target = (padded_batch(x, len(x)) for x in (source, target))
  weights = np.asarray(target_attention_weights(model, params, source, target))
  lengths = ((x != PAD).sum(1) for x in (source, target))
  return [each[..., :t, :s] for each, s, t in zip(weights, *lengths)]


def pair_weights(
  model: nn.Module, params: Any, source: np.ndarray, target: np.ndarray
) -> dict[str, np.ndarray]:
  """Returns the weights [L, H, T, S] of one pair by kind, without padding."""
  # Few widths are compiled.
  longest: int = model.max_length
  fill = (max(longest - len(x), 0) for x in (source, target))
  tokens = [
    padded_batch(np.pad(x, (0, n))[None], 1)
    for x, n in zip((source, target), fill)
  ]
  weights = jax.device_get(_weights(model, params, *tokens, kinds=KINDS))
  s, t = ((x != PAD).sum() for x in (source, target))
  sizes = {CROSS: (t, s), ENCODER: (s, s), DECODER: (t, t)}
  return {
    kind: array[0, :, :, : sizes[kind][0], : sizes[kind][1]]
    for kind, array in weights.items()
  }


def alignment_error_rates(
  experiment: Experiment, params: Any, examples: EvaluationSet
) -> dict[str, float]:
  """Returns the alignment error rate of each head on some references."""
  if getattr(experiment.config.model, "attention", None) == "none":
    return {}
  source, target = (np.asarray(x)[:_NUM_ALIGNED] for x in examples.batch)
  gold = [
    experiment.data.gold_alignments(*(x[x != PAD] for x in pair))
    for pair in zip(source, target)
  ]
  known = [i for i, each in enumerate(gold) if each is not None]
  if not known:
    return {}
  pairs: dict[str, list[tuple[np.ndarray, Any]]] = {}
  weights = unpadded_weights(
    experiment.model, params, source[known], target[known]
  )
  for i, each in zip(known, weights):
    for name, head in named_heads(each).items():
      pairs.setdefault(name or _ONLY_HEAD, []).append((head, gold[i]))
  return {name: alignment_error_rate(each) for name, each in pairs.items()}


def named_heads(weights: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the weights [T, S] of each head by name; "" if there is only one.

  `weights` has [L, H, T, S] of L layers and H heads.
  """
  heads = list(np.ndindex(weights.shape[:2]))
  if len(heads) == 1:
    return {"": weights[0, 0]}
  return {
    f"layer {layer + 1}, head {head + 1}": weights[layer, head]
    for layer, head in heads
  }


def alignment_error_rate(
  pairs: Iterable[tuple[np.ndarray, GoldAlignments]],
) -> float:
  """Returns ``1 - (|A and S| + |A and P|) / (|A| + |S|)``, from 0 to 1."""
  # A are alignments by the largest positive weight, S the sure gold alignments
  # and P the possible ones. See Och and Ney, 2003, section 5
  # (https://aclanthology.org/J03-1002/).
  aligned = sure = right = 0
  for weights, gold in pairs:
    # Target tokens without a gold alignment, such as EOS, are left out.
    rows = np.flatnonzero(gold.possible.any(1))
    rows = rows[weights[rows].max(1) > 0]
    chosen = weights[rows].argmax(1)
    aligned += len(rows)
    sure += int(gold.sure.sum())
    right += int(gold.sure[rows, chosen].sum())
    right += int(gold.possible[rows, chosen].sum())
  return 1 - right / max(aligned + sure, 1)
