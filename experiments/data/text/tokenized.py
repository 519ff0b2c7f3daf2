"""Training pairs as token ids in files, from which single pairs are read.

`train.lengths` has two int32 numbers for each pair of the text, the tokens of
source and target; both are 0 for a blank pair. `train.tokens` has the tokens
themselves, source and target of one pair after the other. `train.digests` has
a SHA-256 hash of the text of each chunk of pairs: the chunks that are written.
"""

import collections
import concurrent.futures
import hashlib
import itertools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import progress
from experiments.cores import num_cores
from experiments.data.text.tokenizer import Tokenizer, normalized

LENGTHS, TOKENS, DIGESTS = "train.lengths", "train.tokens", "train.digests"
# Fixed, because the digests are those of chunks.
CHUNK = 10_000
# Processes take two seconds to start, in which one encodes this many pairs.
_MIN_PARALLEL = 100_000

Pair = tuple[str, str]


class _Chunk(NamedTuple):
  """What a chunk of pairs adds to each file."""

  lengths: bytes
  tokens: bytes
  digest: bytes


class TokenizedPairs:
  """The pairs of a folder; reading one takes no memory for the others."""

  def __init__(self, folder: Path, dtype: np.dtype):
    self.lengths = _read_lengths(folder)  # [N, 2], without EOS
    self._starts = np.zeros(len(self.lengths) + 1, np.int64)
    np.cumsum(self.lengths.sum(1), out=self._starts[1:])
    self._dtype = dtype
    # Pages of a memory map would count as this process's memory.
    self._file = os.open(folder / TOKENS, os.O_RDONLY)
    weakref.finalize(self, os.close, self._file)

  def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a source and its target."""
    source, target = self.lengths[index].tolist()
    size = self._dtype.itemsize
    begin = int(self._starts[index]) * size
    data = os.pread(self._file, (source + target) * size, begin)
    tokens = np.frombuffer(data, self._dtype)
    return tokens[:source], tokens[source:]


def token_dtype(tokenizers: Sequence[Tokenizer]) -> np.dtype:
  """Returns the smallest type for the token ids of all tokenizers."""
  largest = max(tokenizer.vocabulary_size for tokenizer in tokenizers)
  return np.dtype(np.uint16 if largest <= 2**16 else np.int32)


def is_complete(folder: Path, num_pairs: int, dtype: np.dtype) -> bool:
  """Whether the files have all tokens of a text of so many pairs."""
  if not (folder / LENGTHS).exists():
    return False
  lengths = _read_lengths(folder)
  size = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
  return len(lengths) == num_pairs and _size(folder / TOKENS) == size


def write(
  pairs: Iterable[Pair],
  num_pairs: int,
  tokenizers: tuple[Tokenizer, Tokenizer],
  folder: Path,
) -> None:
  """Encodes a text; continues after the chunks that are already written."""
  dtype = token_dtype(tokenizers)
  first = _drop_unfinished(folder, dtype)
  names = LENGTHS, TOKENS, DIGESTS
  bar = progress.counting(
    "pair",
    description="encoding the training text",
    total=num_pairs,
    initial=min(first * CHUNK, num_pairs),
  )
  rest = itertools.islice(_chunked(pairs), first, None)
  with bar as advance:
    files = [(folder / name).open("ab") for name in names]
    try:
      for chunk in _encoded(rest, num_pairs - first * CHUNK, tokenizers):
        for file, data in zip(files, chunk):
          file.write(data)
          file.flush()
        advance(len(chunk.lengths) // 8)
    finally:
      for file in files:
        file.close()


def num_written(folder: Path) -> int:
  """Returns the number of pairs whose lengths are written."""
  return _size(folder / LENGTHS) // 8


def first_difference(pairs: Iterable[Pair], folder: Path) -> int | None:
  """Returns the first line of the first chunk that differs from the files."""
  written = (folder / DIGESTS).read_bytes()
  digests = [written[i : i + 32] for i in range(0, len(written), 32)]
  chunks = (_digest(_normalized(chunk)) for chunk in _chunked(pairs))
  for number, both in enumerate(itertools.zip_longest(digests, chunks)):
    if both[0] != both[1]:
      return number * CHUNK + 1
  return None


def _read_lengths(folder: Path) -> np.ndarray:
  lengths = np.fromfile(folder / LENGTHS, np.int32)
  return lengths[: len(lengths) // 2 * 2].reshape(-1, 2)


def _drop_unfinished(folder: Path, dtype: np.dtype) -> int:
  """Ends the files after the last chunk that all of them have; counts them."""
  if not (folder / LENGTHS).exists():
    count, tokens = 0, 0
  else:
    totals = _read_lengths(folder).sum(1, dtype=np.int64)
    full = len(totals) // CHUNK * CHUNK
    ends = totals[:full].reshape(-1, CHUNK).sum(1).cumsum()
    held = _size(folder / TOKENS) // dtype.itemsize
    count = min(int((ends <= held).sum()), _size(folder / DIGESTS) // 32)
    tokens = int(ends[count - 1]) if count else 0
  sizes = count * CHUNK * 8, tokens * dtype.itemsize, count * 32
  for name, size in zip((LENGTHS, TOKENS, DIGESTS), sizes):
    with (folder / name).open("ab") as file:
      file.truncate(size)
  return count


def _size(path: Path) -> int:
  return path.stat().st_size if path.exists() else 0


def _chunked(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
  pairs = iter(pairs)
  while chunk := list(itertools.islice(pairs, CHUNK)):
    yield chunk


def _normalized(chunk: list[Pair]) -> list[Pair]:
  return [(normalized(source), normalized(target)) for source, target in chunk]


def _digest(chunk: list[Pair]) -> bytes:
  lines = itertools.chain.from_iterable(chunk)
  return hashlib.sha256("\n".join(lines).encode()).digest()


def _encode(
  tokenizers: tuple[Tokenizer, Tokenizer], chunk: list[Pair]
) -> _Chunk:
  chunk = _normalized(chunk)
  digest = _digest(chunk)
  texts = [pair if all(pair) else ("", "") for pair in chunk]
  sides = [
    tokenizer.encode_normalized(lines)
    for tokenizer, lines in zip(tokenizers, zip(*texts))
  ]
  rows = [ids for pair in zip(*sides) for ids in pair]
  lengths = np.fromiter(map(len, rows), np.int32, len(rows))
  array = np.concatenate(rows).astype(token_dtype(tokenizers))
  return _Chunk(lengths.tobytes(), array.tobytes(), digest)


def _encoded(
  chunks: Iterable[list[Pair]],
  num_pairs: int,
  tokenizers: tuple[Tokenizer, Tokenizer],
) -> Iterator[_Chunk]:
  """Yields chunks in order; processes encode those of a large text."""
  count = num_cores()
  if num_pairs < _MIN_PARALLEL or count == 1:
    yield from (_encode(tokenizers, chunk) for chunk in chunks)
    return
  executor = concurrent.futures.ProcessPoolExecutor(
    count,
    # JAX has threads, which a fork would not have.
    multiprocessing.get_context("spawn"),
    _start_process,
    ([(tokenizer.model, tokenizer.kind) for tokenizer in tokenizers],),
  )
  with executor:
    waiting: collections.deque[concurrent.futures.Future[_Chunk]]
    waiting = collections.deque()
    for chunk in chunks:
      waiting.append(executor.submit(_encode_in_process, chunk))
      if len(waiting) > 2 * count:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()


_of_process: list[Callable[[list[Pair]], _Chunk]] = []


def _start_process(models: list[tuple[bytes, str]]) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process stops us
  source, target = itertools.starmap(Tokenizer, models)
  _of_process.append(lambda chunk: _encode((source, target), chunk))


def _encode_in_process(chunk: list[Pair]) -> _Chunk:
  return _of_process[0](chunk)
