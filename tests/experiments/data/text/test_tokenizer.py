"""Tokenizers: round trips, vocabularies, unknown text."""

import io
import itertools
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base
from experiments.config import TokenizerConfig
from experiments.data.batch import BOS, EOS, PAD, UNK
from experiments.data.text import tokenizer as tokenizer_lib
from experiments.data.text.tokenizer import Tokenizer, normalized, train
from experiments.errors import UserError

FIELD = "config.data.source_tokenizer"
LINES = [
  " ".join(words)
  for words in itertools.product(
    ("Ein Hund", "Die Straße", "Größe", "강아지가", "Two dogs,", "«Ça va?»"),
    ("läuft", "ist schön", "눈 속을", "run; fast", "über-all"),
    ("im Schnee.", "달립니다!", "(heute)", "12,5 % …", "it's ok"),
  )
]
SIZES = {"unigram": 66, "bpe": 150, "words": 100, "characters": 100}


def trained(kind, size=None, lines=LINES):
  config = TokenizerConfig(**base.tokenizer(kind, size or SIZES[kind]))
  return train(lines, config, fields=[FIELD])


@pytest.fixture(scope="module")
def tokenizers():
  return {kind: trained(kind) for kind in SIZES}


@pytest.fixture(params=list(SIZES))
def tokenizer(request, tokenizers):
  return tokenizers[request.param]


def test_training_text_round_trips(tokenizer):
  assert tokenizer.decode(tokenizer.encode(LINES)) == LINES


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(sorted({*"".join(LINES)})), max_size=5))
def test_text_of_known_characters_round_trips(tokenizers, texts):
  expected = [normalized(text) for text in texts]
  for kind in ("unigram", "bpe", "characters"):
    encoded = tokenizers[kind].encode(texts)
    assert all(row.dtype == np.int32 for row in encoded)
    assert not np.isin(np.concatenate([[9], *encoded]), range(UNK + 1)).any()
    assert tokenizers[kind].decode(encoded) == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(" ".join(LINES).split())))
def test_text_of_known_words_round_trips(tokenizers, words):
  encoded = tokenizers["words"].encode([" ".join(words)])
  assert len(encoded[0]) == len(words)
  assert tokenizers["words"].decode(encoded) == [" ".join(words)]


def test_all_unicode_spaces_become_one_space():
  spaces = "\t \u00a0\u2009\u3000\r\x85\u2028\x1f"
  assert normalized(f"{spaces}a{spaces}b\n") == "a b"
  assert normalized(spaces) == ""


def test_text_is_normalised_to_form_c(tokenizer):
  apart = [unicodedata.normalize("NFD", line) for line in LINES]
  assert apart != LINES
  assert [normalized(line) for line in apart] == LINES
  np.testing.assert_equal(tokenizer.encode(apart), tokenizer.encode(LINES))
  # Form C only: characters that merely look alike stay different.
  assert normalized("ﬁ Å²…") == "ﬁ Å²…"


@pytest.mark.parametrize("kind", SIZES)
def test_decomposed_text_trains_the_same_tokenizer(kind, tokenizers):
  apart = [unicodedata.normalize("NFD", line) for line in LINES]
  assert trained(kind, lines=apart).model == tokenizers[kind].model


def test_special_tokens_come_first(tokenizer):
  assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
  special = ["<pad>", "<s>", "</s>", "<unk>"]
  assert tokenizer.words(np.arange(4)) == special
  # Their names in text are text.
  for row in tokenizer.encode(special):
    assert not {PAD, BOS, EOS} & set(row.tolist())


def test_decoding_ends_at_eos_or_pad(tokenizer):
  rows = tokenizer.encode([LINES[0], LINES[1]])
  ended = [np.append(rows[0], [EOS, *rows[1]]), np.append(rows[1], [PAD, 9])]
  assert tokenizer.decode(ended) == LINES[:2]
  assert tokenizer.decode([np.array([EOS])]) == [""]


def test_labels_show_spaces(tokenizers):
  tokens = tokenizers["words"].encode(["Ein Hund"])[0]
  assert tokenizers["words"].words(tokens) == ["_Ein", "_Hund"]
  tokens = tokenizers["characters"].encode(["a b"])[0]
  assert tokenizers["characters"].words(tokens) == ["_", "a", "_", "b"]


def test_unknown_text_is_named_and_becomes_unk(tokenizer):
  line = f"{LINES[0]} ☃ x☃ 世界 ☃"
  assert tokenizer.unknown(LINES[0]) == ""
  assert set(tokenizer.unknown(line).split()) in (
    {"☃", "x", "世界"},
    {"☃", "x☃", "世界"},
  )
  (row,) = tokenizer.encode([line])
  assert UNK in row
  (text,) = tokenizer.decode([row])
  assert text.startswith(f"{LINES[0]} ")
  assert set(text.removeprefix(LINES[0])) <= {"\u2047", " "}


def test_unknown_part_of_a_word_is_named_alone(tokenizers):
  for kind in ("unigram", "bpe", "characters"):
    assert tokenizers[kind].unknown("Ein☃Hund Größe☃ ☃☃ ☃") == "☃ ☃☃"


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_vocabulary_limits_in_messages_are_exact(kind):
  size = re.escape(f"{FIELD}.vocabulary_size: ")
  with pytest.raises(UserError, match=f"{size}9999 is more than") as caught:
    trained(kind, 9999)
  most = int(re.search(r"; use at most (\d+)$", str(caught.value))[1])
  assert trained(kind, most).vocabulary_size == most
  with pytest.raises(UserError, match=f"use at most {most}"):
    trained(kind, most + 1)
  message = f"{size}8 has no room for the text's characters; use at least"
  with pytest.raises(UserError, match=message) as caught:
    trained(kind, 8)
  least = int(
    re.search(r"at least (\d+), or kind 'words'", str(caught.value))[1]
  )
  assert trained(kind, least).vocabulary_size == least
  with pytest.raises(UserError, match=f"use at least {least}"):
    trained(kind, least - 1)


def test_words_and_characters_may_be_fewer_than_configured():
  words = set(" ".join(LINES).split())
  assert trained("words", 9999).vocabulary_size == 4 + len(words)
  characters = set("".join(LINES))
  assert trained("characters", 9999).vocabulary_size == 4 + len(characters)
  small = trained("words", 10)
  assert small.vocabulary_size == 10
  assert small.unknown(LINES[0]) != ""


def test_a_sample_is_reproducible_and_uniform():
  sampled = tokenizer_lib.sample(iter(range(100_000)), 10_000)
  assert sampled == tokenizer_lib.sample(iter(range(100_000)), 10_000)
  assert len(set(sampled)) == 10_000
  shares = np.histogram(sampled, 10, (0, 100_000))[0] / 10_000
  np.testing.assert_allclose(shares, 0.1, atol=0.01)  # three deviations


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_sample_of_a_short_text_is_the_text(count):
  assert tokenizer_lib.sample(iter(range(count)), 7) == list(range(count))


@pytest.mark.parametrize("model", [b"garbage", b"\0" * 99, "half"])
def test_damaged_model_is_refused(model, tokenizers):
  if model == "half":
    model = tokenizers["bpe"].model[:-100]
  with pytest.raises(ValueError, match="no SentencePiece model, or a damaged"):
    Tokenizer(model, "bpe")


def test_model_with_other_special_tokens_is_refused():
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(LINES),
    model_writer=model,
    model_type="char",
    vocab_size=100,
    hard_vocab_limit=False,
    minloglevel=4,
  )
  for content in (model.getvalue(), b""):
    with pytest.raises(
      ValueError, match="begin with <pad>, <s>, </s> and <unk>"
    ):
      Tokenizer(content, "bpe")


def test_empty_text_has_no_tokens(tokenizer):
  assert tokenizer.encode([]) == tokenizer.decode([]) == []
  assert [row.tolist() for row in tokenizer.encode(["", " \u00a0"])] == [[], []]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text("Haunds ▁★한X<>/", max_size=30), max_size=5))
def test_encoding_by_words_equals_that_of_whole_lines(tokenizers, texts):
  lines = [normalized(text) for text in [*LINES[:9], *texts, "X X ★ Hund"]]
  for tokenizer in tokenizers.values():
    whole = Tokenizer(tokenizer.model, "unigram").encode_normalized(lines)
    np.testing.assert_equal(tokenizer.encode_normalized(lines), whole)
