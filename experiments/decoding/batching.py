"""Answering many sources: sorted by length, batch by batch, compiled.

Axes: N sources, B of them at a time, K best answers, S source, T target.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from experiments import decoding
from experiments.data.batch import PAD
from experiments.decoding import Constraints
from experiments.distributed import mesh as mesh_lib

# Sources that are decoded or scored at once; of beams, that many hypotheses.
ROWS = 256
# Widths are multiples of the one, lengths that answers are chosen for of the
# other, so that few shapes are compiled.
_WIDTH_STEP, _LENGTH_STEP = 32, 16


@dataclasses.dataclass(frozen=True)
class Search:
  """How to choose an answer.

  Attributes:
    beam_size: hypotheses kept while searching; 1 is greedy.
    n_best: number of answers to return, at most beam_size.
    length_penalty: alpha of GNMT's length normalisation.
    temperature: above 0 answers are drawn, from logits divided by it.
    top_k: of how many of the likeliest tokens to draw; 0 for all.
    seed: of the drawing.
    max_length: tokens of an answer at most, EOS included; None for what suits
      the sources.
    constraints: what an answer may not contain.

  Example:
    >>> Search(beam_size=5).rows
    51
  """

  beam_size: int = 1
  n_best: int = 1
  length_penalty: float = 1.0
  temperature: float = 0.0
  top_k: int = 0
  seed: int = 0
  max_length: int | None = None
  constraints: Constraints = Constraints()

  @property
  def rows(self) -> int:
    """B, the number of sources to answer at once."""
    return max(ROWS // self.beam_size, 16)

  def __call__(self, model, params, source, place, max_length):
    """Answers sources [B, S]: tokens [B, K, T] and scores [B, K].

    Args:
      model: the model.
      params: its parameters.
      source: [B, S] token ids.
      place: numbers that no other sources have; what is drawn depends on them.
      max_length: T.

    Returns:
      The best answers and their scores.
    """
    options = {"max_length": max_length, "constraints": self.constraints}
    if self.beam_size > 1 or self.n_best > 1:
      found = decoding.beam(
        model,
        params,
        source,
        beam_size=self.beam_size,
        n_best=self.n_best,
        length_penalty=self.length_penalty,
        **options,
      )
      return found.tokens, found.scores
    if self.temperature:
      rng = jax.random.key(self.seed)
      for number in place:
        rng = jax.random.fold_in(rng, number)
      tokens = decoding.sample(
        model,
        params,
        source,
        rng,
        temperature=self.temperature,
        top_k=self.top_k,
        **options,
      )
    else:
      tokens = decoding.greedy(model, params, source, **options)
    return tokens[:, None], np.zeros((len(source), 1), np.float32)


class Answers(NamedTuple):
  """What came of sources, in their order.

  Attributes:
    tokens: [N, K, T] token ids, best first, PAD after EOS.
    scores: [N, K], of a beam search; zeros without one.
    seconds: of decoding, compilation left out.
  """

  tokens: np.ndarray
  scores: np.ndarray
  seconds: float


def make_answerer(
  model: nn.Module,
  mesh: Mesh,
  search: Search,
  max_prediction_length: Callable[[int], int],
) -> Callable[..., Answers]:
  """Makes a function that answers sources with given parameters.

  It compiles once for each width.

  Args:
    model: the model.
    mesh: the devices.
    search: how to choose an answer.
    max_prediction_length: (S) -> T, for sources of up to S tokens.

  Returns:
    (params, sources [N, S], progress=None, first=0) -> answers; `progress` is
    called with the number of sources done since the last call, and `first` is
    the number of sources in earlier calls, so that each is drawn anew.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> from experiments.config import MeshConfig
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source = np.array([[3, 4, 2], [3, 2, 0]])
    >>> params = model.init(jax.random.key(0), source, source)["params"]
    >>> answer = make_answerer(
    ...   model, mesh_lib.make_mesh(MeshConfig.one()), Search(), lambda width: 5
    ... )
    >>> answer(params, source).tokens.shape
    (2, 1, 5)
  """

  def decode_batch(length, params, source, place):
    def answered(params, source):
      return search(model, params, source, place, length)

    # What is drawn depends on the whole batch, what a beam finds does not.
    if search.beam_size > 1:
      answered = mesh_lib.each_its_rows(answered, mesh)
    return answered(params, source)

  run = Compiled(decode_batch, mesh)
  rows = mesh_lib.rounded_up(search.rows, mesh)

  def answer(
    params: Any, sources: np.ndarray, progress=None, first: int = 0
  ) -> Answers:
    tokens: list[Any] = [None] * len(sources)
    scores = np.zeros((len(sources), search.n_best), np.float32)
    seconds = 0.0
    for index, (members, part) in enumerate(by_length(rows, sources)):
      place = np.array([first, index], np.uint32)
      longest = int((part != PAD).sum(1).max())
      longest = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
      longest = min(longest, part.shape[1])
      suitable = max(
        max_prediction_length(longest), search.constraints.min_length + 1
      )
      length = search.max_length or suitable
      (found, score), took = run(length, params, part, place)
      seconds += took
      scores[members] = score[: len(members)]
      for row, member in zip(found, members):
        tokens[member] = row
      if progress:
        progress(len(members))
    return Answers(_stacked(tokens, search.n_best), scores, seconds)

  return answer


def by_length(
  rows: int, sources: np.ndarray, *others: np.ndarray
) -> Iterator[tuple[np.ndarray, ...]]:
  """Cuts sources into batches of similar length, the shortest first.

  Args:
    rows: B.
    sources: [N, S] token ids.
    *others: [N, *] token ids that belong to the sources.

  Yields:
    Indices of up to B sources; the sources, [B, width], and the others, filled
    up with rows of PAD and of one of few widths.

  Example:
    >>> sources = np.array([[3, 4, 2], [3, 2, 0]])
    >>> [members.tolist() for members, _ in by_length(1, sources)]
    [[1], [0]]
  """
  order = np.argsort((sources != PAD).sum(1), kind="stable")
  for start in range(0, len(order), rows):
    members = order[start : start + rows]
    parts = (array[members] for array in (sources, *others))
    yield members, *(filled(part, rows) for part in parts)


def filled(array: np.ndarray, rows: int) -> np.ndarray:
  """Brings token ids to a number of rows, and to one of few widths.

  Args:
    array: [N, L] token ids, padded with PAD.
    rows: B, at least N.

  Returns:
    [B, *] token ids, no wider than L.

  Example:
    >>> filled(np.array([[3, 2, 0]]), 2).tolist()
    [[3, 2, 0], [0, 0, 0]]
  """
  width = max(int((array != PAD).sum(1).max()), 1)
  width = min(-(-width // _WIDTH_STEP) * _WIDTH_STEP, array.shape[1])
  fill = ((0, rows - len(array)), (0, 0))
  return np.pad(array[:, :width], fill, constant_values=PAD)


class Compiled:
  """A function of (length, params, batch, ...), compiled before it is timed.

  Example:
    >>> def stretched(length, params, batch):
    ...   return params * length * batch
    >>> from experiments.config import MeshConfig
    >>> run = Compiled(stretched, mesh_lib.make_mesh(MeshConfig.one()))
    >>> result, seconds = run(3, np.float32(2), np.ones((1, 1), np.float32))
    >>> result.tolist()
    [[6.0]]
  """

  def __init__(self, function: Callable, mesh: Mesh):
    """Wraps a function.

    Args:
      function: its length is static, its batch has a row an example.
      mesh: the devices, which share the rows.
    """
    self._mesh = mesh
    self._jitted = jax.jit(
      function, static_argnums=0, out_shardings=mesh_lib.replicated(mesh)
    )
    self._compiled: dict[Any, Any] = {}

  def __call__(self, length, params, batch, *rest) -> tuple[Any, float]:
    """Returns the result as host arrays, and the seconds that it took."""
    batch = mesh_lib.place_whole(batch, self._mesh)
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
    case = (length, shapes)
    if case not in self._compiled:
      lowered = self._jitted.lower(length, params, batch, *rest)
      self._compiled[case] = lowered.compile()
    begin = time.perf_counter()
    result = jax.device_get(self._compiled[case](params, batch, *rest))
    return result, time.perf_counter() - begin


def _stacked(rows: list[np.ndarray], count: int) -> np.ndarray:
  """Stacks [K, T] token ids of different widths into [N, K, T]."""
  width = max((row.shape[-1] for row in rows), default=1)
  stacked = np.full((len(rows), count, width), PAD, np.int32)
  for place, row in zip(stacked, rows):
    place[:, : row.shape[-1]] = row
  return stacked
