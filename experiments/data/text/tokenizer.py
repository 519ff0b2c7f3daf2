"""SentencePiece tokenizers for subwords, words or characters."""

import io
import itertools
import math
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import sentencepiece

from experiments.config import TokenizerConfig
from experiments.data.batch import BOS, EOS, PAD, UNK, strip
from experiments.errors import UserError

_SPACE = "\u2581"  # SentencePiece's symbol for a space
_MAX_WORDS = 1 << 17
_UNK = np.int32(UNK).tobytes()
# Of Kudo and Richardson, 2018 (https://arxiv.org/abs/1808.06226).
_MODEL_TYPES = {
  "unigram": "unigram",
  "bpe": "bpe",
  "words": "word",
  "characters": "char",
}
# Of a unigram model, sums of rounded log-probabilities choose the tokens, and
# may depend on the words before.
_BY_WORDS = ("bpe", "words", "characters")

T = TypeVar("T")


class Tokenizer:
  """A trained tokenizer; `model` is SentencePiece's serialisation of it."""

  def __init__(self, model: bytes, kind: str):
    self.model, self.kind = model, kind
    try:
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
      raise ValueError("no SentencePiece model, or a damaged one") from error
    processor = self._processor
    special = processor.pad_id(), processor.bos_id(), processor.eos_id()
    if (*special, processor.unk_id()) != (PAD, BOS, EOS, UNK):
      raise ValueError(
        "a SentencePiece model that does not begin with <pad>, <s>, </s> and"
        " <unk>; another program made it, or it is damaged"
      )
    self._words = _WordCache(processor.encode)

  @property
  def vocabulary_size(self) -> int:
    """Number of token ids, special ones included."""
    return self._processor.get_piece_size()

  def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Returns an int32 vector of token ids for each line, without EOS."""
    return self.encode_normalized([normalized(line) for line in lines])

  def encode_normalized(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Like `encode`, for lines that are normalised."""
    if self.kind in _BY_WORDS:
      return [self._words.encode(line) for line in lines]
    encoded = self._processor.encode(list(lines), out_type=int, num_threads=1)
    return [np.array(ids, np.int32) for ids in encoded]

  def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
    """Returns the text of each vector of token ids, up to EOS or PAD."""
    return [self._processor.decode(strip(row).tolist()).strip() for row in rows]

  def words(self, tokens: np.ndarray) -> list[str]:
    """Returns labels of tokens [L]; "_" stands for a space before a token."""
    pieces = self._processor.id_to_piece(np.asarray(tokens).tolist())
    return [piece.replace(_SPACE, "_") for piece in pieces]

  def unknown(self, line: str) -> str:
    """Returns the unknown parts of a line, each once, joined by spaces."""
    pieces = self._processor.encode(normalized(line), out_type=str)
    unknown = [
      piece for piece in pieces if self._processor.piece_to_id(piece) == UNK
    ]
    return " ".join(
      dict.fromkeys(" ".join(unknown).replace(_SPACE, " ").split())
    )


class _WordCache(dict[str, bytes]):
  """The int32 token ids of words, as `encode` computes them."""

  # Encoding a line with `encode` gives the same: no token crosses a space.

  def __init__(self, encode: Callable[[str], list[int]]):
    super().__init__()
    self._encode = encode

  def __missing__(self, word: str) -> bytes:
    ids = np.array(self._encode(word), np.int32).tobytes()
    if len(self) < _MAX_WORDS:
      self[word] = ids
    return ids

  def encode(self, line: str) -> np.ndarray:
    """Returns the token ids of a line with single spaces."""
    if _SPACE in line:  # This character is a space, too.
      return np.array(self._encode(line), np.int32)
    # Joining bytes takes half the time of joining lists of integers.
    data = b"".join(map(self.__getitem__, line.split(" ")))
    ids = np.frombuffer(data, np.int32)
    return _with_single_unknowns(ids) if _UNK in data else ids


def _with_single_unknowns(ids: np.ndarray) -> np.ndarray:
  """Replaces a run of unknown tokens by one, as SentencePiece does."""
  unknown = ids == UNK
  return ids[~(unknown & np.append(False, unknown[:-1]))]


def normalized(line: str) -> str:
  """Returns a line in Unicode's normal form C, with single spaces."""
  return " ".join(unicodedata.normalize("NFC", line).split())


def sample(lines: Iterable[T], size: int) -> list[T]:
  """Returns a random sample; all, in their order, if there are at most `size`.

  Algorithm L of Li, 1994 (https://doi.org/10.1145/198429.198435).
  """
  rng = random.Random(0)
  rest = iter(lines)
  sampled = list(itertools.islice(rest, size))
  bound = 1.0  # the largest of the random numbers that the sample has drawn
  while True:
    bound *= (1 - rng.random()) ** (1 / size)
    skipped = int(math.log(1 - rng.random()) / math.log1p(-bound))
    chosen = list(itertools.islice(rest, skipped, skipped + 1))
    if not chosen:
      return sampled
    sampled[rng.randrange(size)] = chosen[0]


def train(
  lines: Iterable[str], config: TokenizerConfig, *, fields: Sequence[str]
) -> Tokenizer:
  """Trains a tokenizer; the same text always gives the same tokenizer.

  Messages name all `fields` that must be changed together.
  """
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=(normalized(line) for line in lines),
      model_writer=model,
      model_type=_MODEL_TYPES[config.kind],
      vocab_size=config.vocabulary_size,
      hard_vocab_limit=config.kind in ("unigram", "bpe"),
      use_all_vocab=False,
      character_coverage=1.0,
      max_sentence_length=1 << 20,
      normalization_rule_name="identity",
      pad_id=PAD,
      bos_id=BOS,
      eos_id=EOS,
      unk_id=UNK,
      unk_surface=" \u2047" if config.kind == "words" else "\u2047",
      num_threads=1,  # sums over several threads differ from run to run
      minloglevel=4,
    )
  except (RuntimeError, ValueError, OSError) as error:
    raise UserError(_explain(str(error), config, fields)) from error
  return Tokenizer(model.getvalue(), config.kind)


def _explain(
  message: str, config: TokenizerConfig, fields: Sequence[str]
) -> str:
  """Returns the message for the user for an error of SentencePiece."""
  names = " and ".join(f"{field}.vocabulary_size" for field in fields)
  size = f"{names}: {config.vocabulary_size}"
  most = re.search(r"value <= (\d+)", message)
  if most:
    return f"{size} is more than the text supports; use at most {most[1]}"
  least = re.search(r"required_chars. \d+ vs (\d+)", message)
  if least:
    return (
      f"{size} has no room for the text's characters; use at least {least[1]},"
      " or kind 'words'"
    )
  return f"{fields[0]}: the tokenizer cannot be trained ({message.strip()})"
