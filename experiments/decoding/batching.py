"""Decodes many sources, in compiled batches of similar length."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from attention.arrays.axes import round_up
from experiments import decoding
from experiments.data.batch import PAD
from experiments.decoding import Constraints
from experiments.decoding.batch_function import BatchFunction, Call
from experiments.distributed.mesh import map_shards, platform

# Sources (in a beam search: hypotheses) that are decoded or scored at once. On
# CPUs fewer are faster, because sources that are done wait for the others
# (docs/measurements.md).
_ROWS, _CPU_ROWS, _CPU_HYPOTHESES = 256, 64, 128
# Widths and maximum lengths are rounded up to multiples of these, so that few
# shapes are compiled.
_WIDTH_STEP, _LENGTH_STEP = 32, 16


@dataclasses.dataclass(frozen=True)
class Search:
  """The decoding settings."""

  beam_size: int = 1  # hypotheses kept while searching; 1 is greedy
  n_best: int = 1  # number of predictions to return, at most beam_size
  length_penalty: float = 1.0  # alpha of GNMT's length normalization
  temperature: float = 0.0  # above 0, sample from softmax(logits / temperature)
  top_k: int = 0  # sample from the k most likely tokens; 0 for all
  seed: int = 0  # of sampling
  max_length: int | None = None  # EOS included; None: by the source's length
  constraints: Constraints = Constraints()  # on the predictions

  def __call__(self, model, params, source, limits, indices, max_length):
    """Returns tokens [B, K, T] and scores [B, K]; `indices` seed samples."""
    options: dict[str, Any] = {"max_length": max_length, "limits": limits}
    options["constraints"] = self.constraints
    if self.beam_size > 1 or self.n_best > 1:
      options |= {"beam_size": self.beam_size, "n_best": self.n_best}
      options |= {"length_penalty": self.length_penalty}
      hypotheses = decoding.beam(model, params, source, **options)
      return hypotheses.tokens, hypotheses.scores
    if self.temperature:
      rng = jax.random.key(self.seed)
      for number in indices:
        rng = jax.random.fold_in(rng, number)
      options |= {"temperature": self.temperature, "top_k": self.top_k}
      tokens = decoding.sample(model, params, source, rng, **options)
    else:
      tokens = decoding.greedy(model, params, source, **options)
    return tokens[:, None], np.zeros((len(source), 1), np.float32)


class Predictions(NamedTuple):
  """Decoded sources, in their order."""

  tokens: np.ndarray  # [N, K, T], K predictions, best first; PAD after EOS
  scores: np.ndarray  # [N, K] of a beam search; zeros otherwise
  seconds: float  # of decoding, without compilation


def make_predictor(
  model: nn.Module,
  mesh: Mesh,
  search: Search,
  max_prediction_length: Callable[[int], int],
) -> Callable[..., Predictions]:
  """Makes a function that decodes sources; it compiles once for each width."""
  decode = _batch_decoder(model, mesh, search)
  rows = num_rows(mesh, search.beam_size)

  def limit(source_length: int) -> int:
    least = search.constraints.min_length + 1
    return search.max_length or max(max_prediction_length(source_length), least)

  def predict(
    params: Any,
    sources: np.ndarray,
    progress=None,  # called with the number of sources of each batch
    first: int = 0,  # number of sources in earlier calls, which seeds samples
  ) -> Predictions:
    # The longest first, so that all workers end at about the same time.
    batches = [*by_length(rows, sources)][::-1]
    calls = [
      _make_call(part, limit, (first, index))
      for index, (_, part) in enumerate(batches)
    ]
    decode.compile(params, calls)
    tokens: list[Any] = [None] * len(sources)
    scores = np.zeros((len(sources), search.n_best), np.float32)
    begin = end = time.perf_counter()
    for index, (batch, score) in decode.run(params, calls):
      members, _ = batches[index]
      scores[members] = score[: len(members)]
      for row, member in zip(batch, members):
        tokens[member] = row
      if progress:
        progress(len(members))
      end = time.perf_counter()
    return Predictions(_stacked(tokens, search.n_best), scores, end - begin)

  return predict


def _batch_decoder(
  model: nn.Module, mesh: Mesh, search: Search
) -> BatchFunction:
  """Makes the function of (length, params, batch, indices) that decodes."""

  def decode_batch(length, params, batch, indices):
    def decode(params, batch):
      source, limits = batch
      return search(model, params, source, limits, indices, length)

    # Samples depend on the whole batch, other predictions do not.
    if not search.temperature:
      decode = map_shards(decode, mesh)
    return decode(params, batch)

  return BatchFunction(decode_batch, mesh)


def _make_call(
  sources: np.ndarray, limit: Callable[[int], int], indices: tuple[int, int]
) -> Call:
  """Makes a call of `_batch_decoder`'s function; `indices` seed samples."""
  lengths = (sources != PAD).sum(1)
  longest = round_up(int(lengths.max()), _LENGTH_STEP)
  # A limit depends on the length of its own source only. The result must not
  # depend on the rest of the batch.
  limits = np.array([limit(each) for each in lengths.tolist()], np.int32)
  length = limit(min(longest, sources.shape[1]))
  return Call(length, (sources, limits), (np.array(indices, np.uint32),))


def num_rows(mesh: Mesh, beam_size: int = 1) -> int:
  """The number of sources to decode or score at once, over all devices."""
  hypotheses = _ROWS
  if platform(mesh) == "cpu":
    hypotheses = _CPU_ROWS if beam_size == 1 else _CPU_HYPOTHESES
  return round_up(max(hypotheses // beam_size, 16), mesh.size)


def by_length(
  rows: int, sources: np.ndarray, *others: np.ndarray
) -> Iterator[tuple[np.ndarray, ...]]:
  """Yields indices, sources and others of batches of similar length."""
  order = np.argsort((sources != PAD).sum(1), kind="stable")
  for start in range(0, len(order), rows):
    members = order[start : start + rows]
    parts = (array[members] for array in (sources, *others))
    yield members, *(padded_batch(part, rows) for part in parts)


def padded_batch(array: np.ndarray, rows: int) -> np.ndarray:
  """Pads token ids [N, L] with PAD to `rows` rows and to one of few widths."""
  width = max(int((array != PAD).sum(1).max()), 1)
  width = min(round_up(width, _WIDTH_STEP), array.shape[1])
  fill = ((0, rows - len(array)), (0, 0))
  return np.pad(array[:, :width], fill, constant_values=PAD)


def _stacked(rows: list[np.ndarray], count: int) -> np.ndarray:
  """Stacks [K, T] token ids of different widths into [N, K, T]."""
  width = max((row.shape[-1] for row in rows), default=1)
  stacked = np.full((len(rows), count, width), PAD, np.int32)
  for place, row in zip(stacked, rows):
    place[:, : row.shape[-1]] = row
  return stacked
