"""Token files: single pairs are read, and interrupted writing continues."""

import itertools

import numpy as np
import pytest

from experiments.config import TokenizerConfig
from experiments.data.text import tokenized, tokenizer

PAIRS = [
  (" ".join(words), f" {words[0]}  {words[1]}\n")
  for words in itertools.permutations("abcdef", 3)
]
PAIRS[7] = (" \n", "text")
NUM = len(PAIRS)
FILES = (tokenized.LENGTHS, tokenized.TOKENS, tokenized.DIGESTS)
UINT16 = np.dtype(np.uint16)


@pytest.fixture(scope="module")
def tokenizers():
  lines = [line for pair in PAIRS for line in pair if not line.isspace()]
  config = TokenizerConfig(kind="words", vocabulary_size=50)
  return (tokenizer.train(lines, config, fields=["config.data"]),) * 2


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
  monkeypatch.setattr(tokenized, "CHUNK", 25)


def write(folder, tokenizers, pairs=PAIRS):
  folder.mkdir(exist_ok=True)
  tokenized.write(pairs, NUM, tokenizers, folder)
  return contents(folder)


def contents(folder):
  return [(folder / name).read_bytes() for name in FILES]


def test_each_pair_is_read_alone(tmp_path, tokenizers):
  write(tmp_path, tokenizers)
  pairs = tokenized.TokenizedPairs(tmp_path, UINT16)
  assert tokenized.is_complete(tmp_path, NUM, UINT16)
  assert pairs.lengths[7].tolist() == [0, 0]
  for index in (NUM - 1, 0, 8, 7, 50):
    expected = PAIRS[index] if index != 7 else ("", "")
    for side, tokens, line in zip(tokenizers, pairs[index], expected):
      assert tokens.dtype == np.uint16
      np.testing.assert_array_equal(tokens, side.encode([line])[0])


@pytest.mark.parametrize("file", range(3))
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_interrupted_writing_continues(tmp_path, tokenizers, file, share):
  whole = write(tmp_path / "whole", tokenizers)
  cut = tmp_path / "cut"
  write(cut, tokenizers)
  path = cut / FILES[file]
  path.write_bytes(whole[file][: int(share * len(whole[file]))])
  read = []
  pairs = (read.append(pair) or pair for pair in PAIRS)
  assert write(cut, tokenizers, pairs) == whole
  assert len(read) == NUM  # the chunks that are written are read, not encoded


def test_chunks_that_are_written_are_not_encoded_again(
  tmp_path, tokenizers, monkeypatch
):
  write(tmp_path, tokenizers)
  with (tmp_path / tokenized.TOKENS).open("ab") as file:
    file.truncate(300)
  sizes = []
  encode = tokenized._encode

  def counted(tokenizers, chunk):
    sizes.append(len(chunk))
    return encode(tokenizers, chunk)

  monkeypatch.setattr(tokenized, "_encode", counted)
  write(tmp_path, tokenizers)
  assert 0 < sum(sizes) < NUM


def test_processes_encode_the_same(tmp_path, tokenizers, monkeypatch):
  alone = write(tmp_path / "alone", tokenizers)
  monkeypatch.setattr(tokenized, "_MIN_PARALLEL", 1)
  monkeypatch.setattr(tokenized, "num_cores", lambda: 2)
  assert write(tmp_path / "parallel", tokenizers) == alone


def test_changed_text_is_found(tmp_path, tokenizers):
  write(tmp_path, tokenizers)
  difference = lambda pairs: tokenized.first_difference(pairs, tmp_path)  # noqa: E731
  assert difference(PAIRS) is None
  spaced = [(f" {one}", other) for one, other in PAIRS]
  assert difference(spaced) is None
  assert difference([*PAIRS[:60], ("x", "y"), *PAIRS[61:]]) == 51
  assert difference(PAIRS[:-1]) == 101
  assert difference([*PAIRS, *PAIRS[:30]]) == 101


def test_large_vocabularies_take_four_bytes(tokenizers):
  assert tokenized.token_dtype(tokenizers) == np.uint16

  class Large:
    vocabulary_size = 2**16 + 1

  assert tokenized.token_dtype((tokenizers[0], Large())) == np.int32
