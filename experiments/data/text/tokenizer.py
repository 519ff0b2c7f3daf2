"""Text to token ids and back: subwords, words or characters.

All of them are SentencePiece models (Kudo and Richardson, 2018,
https://arxiv.org/abs/1808.06226), trained within the run. Text is brought to
Unicode's normal form C and to single spaces; nothing else about it changes.
"""

import io
import random
import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece

from experiments.config import TokenizerConfig
from experiments.data.batch import BOS, EOS, PAD, UNK, strip
from experiments.errors import UserError

_MODEL_TYPES = {
  "unigram": "unigram",
  "bpe": "bpe",
  "words": "word",
  "characters": "char",
}
_SPACE = "\u2581"  # how SentencePiece writes a space
# Lines that a tokeniser is trained on at most, drawn at random of more.
_LINES = 2_000_000


class Tokenizer:
  """A trained tokeniser.

  Attributes:
    model: SentencePiece's own serialisation.

  Example:
    >>> config = TokenizerConfig(
    ...   kind="characters", vocabulary_size=20, sampling=0.0
    ... )
    >>> tokenizer = train(["a bad cab"], config, field="config.data")
    >>> tokenizer.decode(tokenizer.encode(["a cab"]))
    ['a cab']
  """

  def __init__(self, model: bytes):
    """Loads a tokeniser.

    Args:
      model: as `Tokenizer.model` returned it.

    Raises:
      ValueError: if it is no SentencePiece model of this package.
    """
    self.model = model
    try:
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
      raise ValueError("no SentencePiece model, or a damaged one") from None
    processor = self._processor
    special = processor.pad_id(), processor.bos_id(), processor.eos_id()
    if (*special, processor.unk_id()) != (PAD, BOS, EOS, UNK):
      raise ValueError(
        "a SentencePiece model that does not begin with <pad>, <s>, </s> and"
        " <unk>; it was made elsewhere, or is damaged"
      )

  @property
  def vocabulary_size(self) -> int:
    """Number of token ids, special ones included."""
    return self._processor.get_piece_size()

  def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Turns lines into token ids, without EOS.

    Args:
      lines: text.

    Returns:
      An int32 vector a line.
    """
    lines = [normalized(line) for line in lines]
    encoded = self._processor.encode(lines, out_type=int, num_threads=1)
    return [np.array(ids, np.int32) for ids in encoded]

  def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
    """Turns token ids into text; what comes after EOS or PAD is left out.

    Args:
      rows: an integer vector a line.

    Returns:
      A line each.
    """
    return [self._processor.decode(strip(row).tolist()).strip() for row in rows]

  def words(self, tokens: np.ndarray) -> list[str]:
    """Names tokens as a reader should see them.

    Args:
      tokens: [L] token ids.

    Returns:
      L strings; a space shows as "_" where it begins a token.
    """
    pieces = self._processor.id_to_piece(np.asarray(tokens).tolist())
    return [piece.replace(_SPACE, "_") for piece in pieces]

  def pieces(self) -> dict[str, tuple[int, float]]:
    """Returns the token id and the score of every piece of text.

    A piece that begins a word begins with a space.
    """
    processor = self._processor
    return {
      processor.id_to_piece(token).replace(_SPACE, " "): (
        token,
        processor.get_score(token),
      )
      for token in range(UNK + 1, self.vocabulary_size)
    }

  def unknown(self, line: str) -> str:
    """Returns what of a line the tokeniser never saw, "" if nothing.

    Args:
      line: text.

    Returns:
      Words, or parts of them, each once, between spaces.
    """
    pieces = self._processor.encode(normalized(line), out_type=str)
    strange = [
      piece for piece in pieces if self._processor.piece_to_id(piece) == UNK
    ]
    return " ".join(
      dict.fromkeys(" ".join(strange).replace(_SPACE, " ").split())
    )


def normalized(line: str) -> str:
  r"""Returns a line in Unicode's normal form C, with single spaces.

  Args:
    line: any text.

  Returns:
    The same for a reader.

  Example:
    >>> normalized(" Cafe\u0301  noir ")
    'Café noir'
  """
  return " ".join(unicodedata.normalize("NFC", line).split())


def train(
  lines: Iterable[str], config: TokenizerConfig, *, field: str
) -> Tokenizer:
  """Trains a tokeniser; the same text gives the same one.

  Args:
    lines: the training text.
    config: the kind and the size.
    field: the config field that it comes from, for messages.

  Returns:
    The tokeniser.

  Raises:
    UserError: if the text does not support so large a vocabulary.

  Example:
    >>> config = TokenizerConfig(kind="words", vocabulary_size=99, sampling=0.0)
    >>> train(["a b a"], config, field="config.data").vocabulary_size
    6
  """
  subwords = config.kind in ("unigram", "bpe")
  lines = list(lines)
  if len(lines) > _LINES:  # SentencePiece draws others in every process
    lines = random.Random(0).sample(lines, _LINES)
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=(normalized(line) for line in lines),
      model_writer=model,
      model_type=_MODEL_TYPES[config.kind],
      vocab_size=config.vocabulary_size,
      hard_vocab_limit=subwords,
      use_all_vocab=False,
      character_coverage=1.0,
      max_sentence_length=1 << 20,
      normalization_rule_name="identity",
      pad_id=PAD,
      bos_id=BOS,
      eos_id=EOS,
      unk_id=UNK,
      unk_surface=" \u2047" if config.kind == "words" else "\u2047",
      num_threads=1,  # sums of several differ from run to run
      minloglevel=4,
    )
  except (RuntimeError, ValueError, OSError) as error:
    raise UserError(_explain(str(error), config, field)) from None
  return Tokenizer(model.getvalue())


def _explain(message: str, config: TokenizerConfig, field: str) -> str:
  """What is wrong with a size, from what SentencePiece says of it."""
  size = f"{field}.vocabulary_size: {config.vocabulary_size}"
  most = re.search(r"value <= (\d+)", message)
  if most:
    return f"{size} is more than the text supports; use at most {most[1]}"
  least = re.search(r"required_chars. \d+ vs (\d+)", message)
  if least:
    return (
      f"{size} has no room for the text's characters; use at least {least[1]},"
      " or kind 'words'"
    )
  return f"{field}: the tokeniser cannot be trained ({message.strip()})"
