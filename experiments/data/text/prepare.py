"""Writes tokenizers and evaluation sets of a corpus into the run directory."""

import hashlib
import itertools
import json
import zlib
from pathlib import Path

from absl import logging

from experiments.config import NumbersConfig, TranslationConfig
from experiments.data.batch import PAD, UNK
from experiments.data.text import numbers, readers
from experiments.data.text import tokenizer as tokenizer_lib
from experiments.data.text.corpus import ParallelCorpus
from experiments.data.text.dataset import (
  DATA,
  SIDES,
  TOKENIZER,
  TranslationDataset,
)
from experiments.data.text.readers import ParallelText
from experiments.errors import UserError
from experiments.run_directory import write_json

# The largest share of unknown tokens without a warning.
_MAX_UNKNOWN = 0.02


def prepare(config: TranslationConfig, workdir: Path) -> TranslationDataset:
  """Reads the training text; writes the files of a run that is not resumed."""
  text = _read(config)
  digest = _digest(text)
  record = workdir / DATA / "corpus.json"
  if record.exists():
    if json.loads(record.read_text())["sha256"] != digest:
      raise UserError(
        "config.data.train: the text differs from the text that this run was"
        " started with; use another --workdir"
      )
  else:
    for split in config.splits:
      _write_text(workdir, config, split, _read(config, split))
    kept = readers.drop_blank_pairs(text)
    if not kept.source:
      raise UserError(
        f"config.data.train: of {len(text.source):,} pairs none has text on"
        " both sides"
      )
    _write_tokenizers(workdir, config, kept)
    write_json(record, {"pairs": len(text.source), "sha256": digest})
  data = TranslationDataset(config, workdir)
  data.corpus = ParallelCorpus(text, data.source, data.target, config)
  _warn_of_unknown(data)
  return data


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


def _read(config: TranslationConfig, split: str | None = None) -> ParallelText:
  """Returns the text of a set, or the training text if `split` is None."""
  if isinstance(config, NumbersConfig):
    return _spelled(config, split)
  path = config.splits[split] if split else config.train
  field = f"splits.{split}" if split else "train"
  return readers.read(config, path, field=f"config.data.{field}")


def _spelled(config: NumbersConfig, split: str | None) -> ParallelText:
  wanted = config.splits[split] if split else config.train
  drawn = numbers.draw(
    {None: "train", "validation": "validation"}.get(split, "test"),
    wanted,
    seed=zlib.crc32(f"{config.seed} {split or 'train'}".encode()),
  )
  return ParallelText(
    numbers.spelled(drawn, config.source, field="config.data.source"),
    numbers.spelled(drawn, config.target, field="config.data.target"),
  )


def _write_tokenizers(workdir: Path, config: TranslationConfig, text) -> None:
  if config.joint_vocabulary:
    lines = itertools.chain(*text)
    joint = tokenizer_lib.train(
      lines, config.source_tokenizer, field="config.data.source_tokenizer"
    )
    trained = [joint, joint]
  else:
    configs = (config.source_tokenizer, config.target_tokenizer)
    trained = [
      tokenizer_lib.train(lines, each, field=f"config.data.{side}_tokenizer")
      for side, each, lines in zip(SIDES, configs, text)
    ]
  (workdir / TOKENIZER).mkdir(parents=True, exist_ok=True)
  for side, each in zip(SIDES, trained):
    (workdir / TOKENIZER / f"{side}.model").write_bytes(each.model)


def _write_text(workdir: Path, config, split: str, text: ParallelText) -> None:
  (workdir / DATA).mkdir(parents=True, exist_ok=True)
  for language, lines in zip((config.source, config.target), text):
    path = workdir / DATA / f"{split}.{language}"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _digest(text: ParallelText) -> str:
  digest = hashlib.sha256()
  for side in text:
    digest.update("\n".join(side).encode())
    digest.update(b"\0")
  return digest.hexdigest()
