"""Prepares a corpus: writes tokenizers, tokens and evaluation sets of a run."""

import itertools
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from absl import logging

from experiments import progress
from experiments.config import NumbersConfig, TaskConfig, TranslationConfig
from experiments.data.batch import PAD, UNK
from experiments.data.text import readers, tokenized
from experiments.data.text import tokenizer as tokenizer_lib
from experiments.data.text.corpus import ParallelCorpus
from experiments.data.text.dataset import (
  DATA,
  SIDES,
  TOKENIZER,
  TranslationDataset,
)
from experiments.data.text.tokenized import Pair, TokenizedPairs
from experiments.data.text.tokenizer import normalized
from experiments.data.text.training_text import TrainingText, pairs_of
from experiments.errors import UserError, counted, naming_field
from experiments.run_directory import (
  CHECKPOINTS,
  LocalFiles,
  naming_full_disk,
  read_config,
  write_json,
)

RECORD = "corpus.json"
# The largest share of unknown tokens without a warning.
_MAX_UNKNOWN = 0.02
# The largest number of pairs to train tokenizers on.
_MAX_SAMPLE = 1_000_000
# Settings of which tokenizers depend, besides the text.
_TOKENIZER_FIELDS = (
  "source",
  "target",
  "source_tokenizer",
  "target_tokenizer",
  "joint_vocabulary",
)
# Settings of which all prepared files depend, if a config has them.
_PREPARED_FIELDS = (*_TOKENIZER_FIELDS, "dir", "train", "splits", "seed")


def prepare(
  config: TranslationConfig,
  workdir: Path,
  *,
  init_from: Path | None = None,  # a run whose tokenizers are used if they fit
) -> TranslationDataset:
  """Encodes the training text, unless that is done; writes a run's files."""
  files = LocalFiles(workdir, (TOKENIZER, DATA))
  local = files.path
  text, folder = TrainingText(config), local / DATA
  record = folder / RECORD
  # Without checkpoints, a start of another config may have failed here.
  is_new = not (workdir / CHECKPOINTS).exists()
  settings = _settings(config, init_from) if is_new else None
  with naming_full_disk(folder):
    known = _known(text, record, settings)
    if known is None:
      known = write_tokenizers_and_sets(text, local, init_from=init_from)
    data = TranslationDataset(config, local)
    tokenizers = data.source, data.target
    dtype = tokenized.token_dtype(tokenizers)
    if not tokenized.is_complete(folder, known["pairs"], dtype):
      tokenized.write(text, known["pairs"], tokenizers, folder)
  files.upload()
  weakref.finalize(data, files.discard)
  data.corpus = ParallelCorpus(TokenizedPairs(folder, dtype), config)
  _warn_of_unknown(data)
  return data


def write_tokenizers_and_sets(
  text: TrainingText,
  workdir: Path,
  *,
  init_from: Path | None = None,
) -> dict[str, Any]:
  """Writes evaluation sets, tokenizers and the record of the text."""
  config, files = text.config, text.files()
  _warn_of_training_text(config)
  for name in (tokenized.LENGTHS, tokenized.TOKENS, tokenized.DIGESTS):
    (workdir / DATA / name).unlink(missing_ok=True)
  for split in config.splits:
    _write_text(workdir, config, split)
  sample, pairs = _sampled(text)
  if not sample:
    raise UserError(
      f"config.data.train: of {counted(pairs, 'pair')} none has text on both"
      " sides"
    )
  if not (init_from and _copy_tokenizers(init_from, workdir, config)):
    _write_tokenizers(workdir, config, sample)
  settings = _settings(config, init_from)
  record = {"pairs": pairs, "files": files, "settings": settings}
  write_json(workdir / DATA / RECORD, record)
  return record


def _known(
  text: TrainingText,
  record: Path,
  settings: dict[str, Any] | None,  # that the record must have; None: any
) -> dict[str, Any] | None:
  """Returns a run's record; None if the text must be prepared (again)."""
  if not record.exists():
    return None
  known = json.loads(record.read_text())
  # Older versions recorded no settings.
  if settings and known.get("settings", settings) != settings:
    return None
  if isinstance(text.config, NumbersConfig):
    return known  # the config determines the text
  if "sha256" in known:  # older versions hashed the whole text
    if text.digest() != known["sha256"]:
      _refuse(1)
    known = {"pairs": known["pairs"], "files": text.files()}
    write_json(record, known)
    return known
  folder, num_pairs, before = record.parent, known["pairs"], known["files"]
  done = tokenized.num_written(folder) == num_pairs
  if done and before and not any(map(os.path.exists, before)):
    logging.warning(
      "config.data.train: %s no longer exists; this run uses the tokens that it"
      " has prepared",
      next(iter(before)),
    )
    return known
  files = text.files()
  if not done:
    return known if files == before else None
  if not files or files != before:
    line = tokenized.first_difference(text, folder)
    if line is not None:
      _refuse(line)
  return known


def _settings(
  config: TranslationConfig, init_from: Path | None
) -> dict[str, Any]:
  """The settings of which all prepared files depend, as JSON."""
  every = config.model_dump(mode="json")
  own = {name: every[name] for name in _PREPARED_FIELDS if name in every}
  return own | {"init_from": init_from and str(init_from)}


def _refuse(line: int) -> NoReturn:
  raise UserError(
    "config.data.train: the text differs from the text that this run was"
    f" started with, from line {line:,} or later; use another --workdir"
  )


def _warn_of_training_text(config: TranslationConfig) -> None:
  """Warns if an evaluation set is the training text."""
  if isinstance(config, NumbersConfig):
    return
  train = readers.files(config, config.train, field="config.data.train")
  for split, path in config.splits.items():
    field = f"config.data.splits.{split}"
    files = readers.files(config, path, field=field)
    if path == config.train or any(map(os.path.samefile, files, train)):
      logging.warning(
        "%s: is the text of config.data.train, so its metrics are those of"
        " training examples",
        field,
      )


def _warn_of_unknown(data: TranslationDataset) -> None:
  """Warns if many tokens of the validation set are unknown."""
  validation = data.evaluation_set("validation").batch
  for side, tokens in zip(SIDES, validation):
    share = (tokens == UNK).sum() / max((tokens != PAD).sum(), 1)
    if share > _MAX_UNKNOWN:
      logging.warning(
        "config.data.%s_tokenizer: %.0f%% of the validation set's tokens do not"
        " occur in training; use subwords or characters (kind=unigram, bpe or"
        " characters)",
        side,
        100 * share,
      )


def _sampled(text: Iterable[Pair]) -> tuple[list[Pair], int]:
  """Samples pairs that have text on both sides; counts all pairs."""
  pairs = 0

  def with_text() -> Iterator[Pair]:
    nonlocal pairs
    for pair in text:
      pairs += 1
      if pairs % tokenized.CHUNK == 0:
        advance(tokenized.CHUNK)
      if readers.has_text(pair):
        yield pair

  with progress.counting("pair", description="counting the pairs") as advance:
    sample = tokenizer_lib.sample(with_text(), _MAX_SAMPLE)
  return sample, pairs


def _write_tokenizers(
  workdir: Path, config: TranslationConfig, sample: list[Pair]
) -> None:
  logging.info("training the tokenizers on %s", counted(len(sample), "pair"))
  sides = [[pair[side] for pair in sample] for side in (0, 1)]
  fields = [f"config.data.{side}_tokenizer" for side in SIDES]
  if config.joint_vocabulary:
    joint = tokenizer_lib.train(
      itertools.chain(*sides),
      config.source_tokenizer,
      fields=fields,
    )
    trained = [joint, joint]
  else:
    configs = (config.source_tokenizer, config.target_tokenizer)
    trained = [
      tokenizer_lib.train(lines, each, fields=[field])
      for lines, each, field in zip(sides, configs, fields)
    ]
  (workdir / TOKENIZER).mkdir(parents=True, exist_ok=True)
  for name, each in zip(SIDES, trained):
    (workdir / TOKENIZER / f"{name}.model").write_bytes(each.model)


def _copy_tokenizers(
  source: Path, workdir: Path, config: TranslationConfig
) -> bool:
  """Copies the tokenizers of a run with the same languages and settings."""
  with naming_field(f"config.train.init_from={source}", source):
    theirs = read_config(source).data
  if isinstance(theirs, TaskConfig) or any(
    getattr(theirs, field) != getattr(config, field)
    for field in _TOKENIZER_FIELDS
  ):
    return False
  (workdir / TOKENIZER).mkdir(parents=True, exist_ok=True)
  for side in SIDES:
    name = f"{TOKENIZER}/{side}.model"
    (workdir / name).write_bytes((source / name).read_bytes())
  logging.info("the tokenizers are those of %s", source)
  return True


def _write_text(workdir: Path, config: TranslationConfig, split: str) -> None:
  """Writes the normalised text of an evaluation set."""
  (workdir / DATA).mkdir(parents=True, exist_ok=True)
  text = list(pairs_of(config, split))
  for side, language in enumerate((config.source, config.target)):
    path = workdir / DATA / f"{split}.{language}"
    lines = (normalized(pair[side]) for pair in text)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
