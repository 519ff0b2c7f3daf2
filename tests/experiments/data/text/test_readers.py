"""Readers: all formats agree, and every error names its file."""

import gzip
import re
import sys
import types

import pytest

from configs import base
from experiments.config import TextConfig
from experiments.data.text import readers
from experiments.data.text.readers import (
  ParallelText,
  decode_lines,
  has_text,
  pairs,
  read_lines,
  read_pair,
)
from experiments.data.text.tokenizer import normalized
from experiments.errors import UserError

FIELD = "config.data.train"
SOURCE = ["Two dogs run.", "Café noir !", "", "last"]
TARGET = ["Zwei Hunde rennen.", "Schwarzer Kaffee!", "leer", "letzte"]
# The same sentences, decomposed and with other spaces.
MESSY = ["  Two\tdogs  run. ", "Cafe\u0301 noir\u00a0!", " \u3000", "last"]


def read(config, path, *, field):
  """All pairs of a path, normalised."""
  sides = zip(*pairs(config, path, field=field))
  return ParallelText(*(list(map(normalized, side)) for side in sides))


def text_config(folder, kind="lines"):
  fields = base.text().to_dict() | {"dir": str(folder), "format": kind}
  return TextConfig(**fields)


def encoded(rows, *, end="\n", mark=""):
  return (mark + end.join(rows)).encode()


def put(path, content):
  path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
  return path


def put_lines(folder, source, target, suffix=""):
  put(folder / f"train.en{suffix}", source)
  put(folder / f"train.de{suffix}", target)


def refused(config, path="train"):
  """Returns the one-line message of a text that cannot be read."""
  with pytest.raises(UserError) as caught:
    read(config, path, field=FIELD)
  message = str(caught.value)
  assert "\n" not in message
  return message


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_and_tables_give_the_same_text(tmp_path, suffix, end, mark):
  put_lines(
    tmp_path,
    encoded(MESSY, end=end, mark=mark),
    encoded([*TARGET, ""], end=end),
    suffix,
  )
  rows = map("\t".join, zip([MESSY[0].replace("\t", " "), *MESSY[1:]], TARGET))
  put(tmp_path / f"train.tsv{suffix}", encoded(rows, end=end, mark=mark))
  expected = ParallelText(SOURCE, TARGET)
  assert read(text_config(tmp_path), "train", field=FIELD) == expected
  table = read(text_config(tmp_path, "tsv"), "train.tsv", field=FIELD)
  assert table == expected


def test_only_a_newline_ends_a_line(tmp_path):
  rows = ["a\rb", "c\x85d", "e\u2028f", "g\x0bh\x0ci", "j\x1ek"]
  file = put(tmp_path / "text", encoded(rows))
  assert list(read_lines(file)) == ["a b", "c d", "e f", "g h i", "j k"]


def test_tilde_in_a_path_is_expanded(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  put_lines(tmp_path, b"a", b"b")
  config = text_config("~")
  assert read(config, "train", field=FIELD) == (["a"], ["b"])


def test_columns_of_a_table_may_be_blank(tmp_path):
  put(tmp_path / "train", b"a\tb\t \n\n\td\ne\t\n")
  text = read(text_config(tmp_path, "tsv"), "train", field=FIELD)
  assert text == (["a", "", "", "e"], ["b", "", "d", ""])


def test_blank_pairs_have_no_text_on_one_side():
  assert has_text(("a\n", "b"))
  for blank in ("", "\n", " \u3000\r\n"):
    assert not has_text(("a", blank))
    assert not has_text((blank, "a"))


def test_missing_file_is_reported_with_the_files_found(tmp_path):
  put(tmp_path / "train.en", b"a")
  put(tmp_path / "train.fr.gz", b"a")
  put(tmp_path / ".hidden", b"a")
  (tmp_path / "folder").mkdir()
  assert refused(text_config(tmp_path)) == (
    f"{FIELD}: no file {tmp_path}/train.de or train.de.gz; in {tmp_path} there"
    " are train.en, train.fr.gz"
  )
  for i in range(20):
    put(tmp_path / f"other{i:02d}", b"a")
  there = ", ".join(f"other{i:02d}" for i in range(12))
  assert refused(text_config(tmp_path)).endswith(f"there are {there}, ...")


@pytest.mark.parametrize("path", [".", "/", "x" * 300])
def test_unusual_paths_are_reported(tmp_path, path):
  for kind in ("lines", "tsv"):
    assert "no file /" in refused(text_config(tmp_path, kind), path)


@pytest.mark.parametrize(
  ("path", "advice"),
  [
    (
      "train",
      "set --config.data.train and --config.data.splits.*, or"
      " --config.data.dir",
    ),
    (
      "val.lc.norm.tok",
      "download it: python -m experiments.download multi30k DIR, and pass"
      " --config.data.dir=DIR",
    ),
  ],
)
def test_fields_to_set_are_named_if_the_text_is_elsewhere(path, advice):
  assert refused(text_config(""), path).endswith(f"; {advice}")


def test_missing_or_empty_folder_is_named(tmp_path):
  (tmp_path / "empty").mkdir()
  config = text_config(tmp_path)
  hint = f"there is no folder {tmp_path}/corpus"
  assert refused(config, "corpus/train").endswith(hint)
  assert refused(config, "empty/train").endswith(f"{tmp_path}/empty is empty")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_empty_file_is_named(tmp_path, suffix):
  put_lines(tmp_path, b"a", b"", suffix)
  file = tmp_path / f"train.de{suffix}"
  assert refused(text_config(tmp_path)) == f"{FIELD}: {file} is empty"
  with pytest.raises(UserError, match=f"^--target: {file} is empty"):
    read_pair(tmp_path / "train.en", file, fields=("--source", "--target"))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_invalid_utf_8_is_reported_with_its_line(tmp_path, suffix):
  put_lines(
    tmp_path, b"a\nb\n", "a\ngr\u00f6\u00dfer\n".encode("latin-1"), suffix
  )
  file = re.escape(f"{tmp_path}/train.de{suffix}")
  message = rf"{file}, line 2: not UTF-8 \(.* at byte 3\); convert it, .*iconv"
  assert re.match(message, refused(text_config(tmp_path)))


def test_utf_16_is_reported_at_line_1(tmp_path):
  put(tmp_path / "train.tsv", "a\tb\n".encode("utf-16"))
  config = text_config(tmp_path, "tsv")
  assert "train.tsv, line 1: not UTF-8" in refused(config, "train.tsv")


def test_unequal_numbers_of_lines_are_reported(tmp_path):
  put_lines(tmp_path, b"a\n" * 1001, b"b\n" * 1000)
  assert refused(text_config(tmp_path)) == (
    f"{FIELD}: {tmp_path}/train.en has 1,001 lines and {tmp_path}/train.de has"
    " 1,000; line i of one must translate line i of the other"
  )


def test_pair_of_files_may_have_any_names(tmp_path):
  source = put(tmp_path / "a", b"a\n")
  put(tmp_path / "b.gz", b"b\n")
  assert read_pair(source, tmp_path / "b", fields=("-s", "-t")) == (
    ["a"],
    ["b"],
  )


DAMAGES = {
  "cut": lambda packed: packed[:-100],
  "start": lambda packed: packed[:10] + b"\xff" * 8 + packed[18:],
  "end": lambda packed: packed[:-8] + bytes(8),
  "no gz": gzip.decompress,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_gz_is_named(tmp_path, damage):
  content = "".join(f"line {i * i}\n" for i in range(2000)).encode()
  put_lines(tmp_path, content, content, ".gz")
  file = tmp_path / "train.de.gz"
  file.write_bytes(damage(file.read_bytes()))
  message = refused(text_config(tmp_path))
  assert re.match(rf"{re.escape(str(file))}: cannot be read \(.+\)$", message)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b"c d", "no tab; a line is source, tab, target"),
    (
      b"c\td\te",
      "3 columns; a line is source, tab, target: cut -f1,2 train.tsv",
    ),
  ],
)
def test_line_with_other_columns_is_named(line, message, tmp_path):
  put(tmp_path / "train.tsv", b"a\tb\n\n" + line)
  assert refused(text_config(tmp_path, "tsv"), "train.tsv") == (
    f"{tmp_path}/train.tsv, line 3: {message}"
  )


def test_stream_is_named_in_messages():
  with pytest.raises(UserError, match="standard input, line 2: not UTF-8"):
    list(decode_lines([b"a\n", b"\xff\n"], "standard input"))


def test_lines_of_a_packed_file_are_counted_and_its_damage_is_named(tmp_path):
  file = tmp_path / "lines.gz"
  file.write_bytes(gzip.compress(b"a\n\nb"))
  assert readers.num_lines(file) == 3
  with readers.open_bytes(file) as stream:
    assert list(decode_lines(stream, "")) == ["a\n", "\n", "b"]
  file.write_bytes(b"a\n")
  with pytest.raises(UserError, match=r"^--source=.*lines.gz: cannot be read"):
    list(decode_lines(readers.open_bytes(file), f"--source={file}"))


def test_missing_package_datasets_gives_the_install_command(
  tmp_path, monkeypatch
):
  monkeypatch.setitem(sys.modules, "datasets", None)
  assert refused(text_config(tmp_path, "huggingface"), "name:train") == (
    "config.data.format: 'huggingface' needs the package datasets; install it"
    " with: pip install -e '.[hf]'"
  )


class _Rows:
  """The part of `datasets.Dataset` that the reader uses."""

  def __init__(self, columns):
    self._columns = columns

  column_names = property(lambda self: list(self._columns))

  @property
  def features(self):
    kinds = {str: "string", int: "int64", type(None): "string"}
    return {
      name: types.SimpleNamespace(dtype=kinds[type(column[0])])
      for name, column in self._columns.items()
    }

  def flatten(self):
    pairs = self._columns["translation"]
    return _Rows(
      {f"translation.{name}": [row[name] for row in pairs] for name in pairs[0]}
    )

  def __len__(self):
    return len(next(iter(self._columns.values())))

  def iter(self, batch_size):
    assert batch_size > len(self)
    yield self._columns


def test_hub_datasets_are_loaded_by_name_and_split(tmp_path, monkeypatch):
  pairs = [{"en": s or None, "de": t} for s, t in zip(MESSY, TARGET)]
  sets = {
    (("me/corpus",), "train"): _Rows({"translation": pairs}),
    (("me/corpus", "de-en"), "test"): _Rows({"en": MESSY, "de": TARGET}),
    (("me/corpus",), "numbers"): _Rows({"en": ["a"], "de": [1]}),
  }
  package = types.SimpleNamespace(
    load_dataset=lambda *name, split: sets[name, split]
  )
  monkeypatch.setitem(sys.modules, "datasets", package)
  config = text_config(tmp_path, "huggingface")
  for path in ("me/corpus:train", "me/corpus:de-en:test"):
    assert read(config, path, field=FIELD) == (SOURCE, TARGET)
  message = refused(config, "me/corpus:numbers")
  assert "has no columns of text en and de; there are en (string)" in message
  assert "cannot be loaded (KeyError" in refused(config, "me/corpus:nothing")


@pytest.fixture
def datasets(tmp_path, monkeypatch):
  """The package, if it is installed: quiet, and cut off from its hub."""
  monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  package = pytest.importorskip("datasets")
  package.disable_progress_bars()
  return package


def test_a_saved_dataset_reads_as_files_do(tmp_path, datasets):
  config = text_config(tmp_path, "huggingface")
  rows = [{"en": s, "de": t} for s, t in zip(MESSY, TARGET)]
  rows[2]["en"] = None
  datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "columns")
  nested = [{"id": i, "translation": row} for i, row in enumerate(rows)]
  datasets.Dataset.from_list(nested).save_to_disk(tmp_path / "nested")
  for path in ("columns", "nested"):
    assert read(config, path, field=FIELD) == (SOURCE, TARGET)


def test_missing_columns_and_splits_are_named(tmp_path, datasets):
  config = text_config(tmp_path, "huggingface")
  one = datasets.Dataset.from_list([{"en": "a", "fr": "b", "de": 1}])
  one.save_to_disk(tmp_path / "one")
  assert refused(config, "one") == (
    f"{FIELD}: one has no columns of text en and de; there are en (string), fr"
    " (string), de (int64)"
  )
  both = datasets.DatasetDict(train=one, test=one)
  both.save_to_disk(tmp_path / "both")
  assert refused(config, "both") == (
    f"{FIELD}: both holds several sets; give one of both/train, both/test"
  )
  all_text = datasets.Dataset.from_dict({"en": ["a"], "de": ["b"]})
  all_text.filter(lambda row: False).save_to_disk(tmp_path / "none")
  assert refused(config, "none") == f"{FIELD}: none is empty"


@pytest.mark.parametrize("path", ["nowhere", "nowhere:train", "a/b:c:train"])
def test_dataset_that_cannot_be_loaded_is_named(tmp_path, datasets, path):
  message = refused(text_config(tmp_path, "huggingface"), path)
  assert message.startswith(f"{FIELD}: {path} cannot be loaded (")
  assert "; it must be NAME:SPLIT, NAME:CONFIG:SPLIT or a folder" in message
