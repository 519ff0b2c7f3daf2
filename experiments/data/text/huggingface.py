"""Parallel text from Hugging Face datasets, on the hub or in a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.config import TextConfig
from experiments.errors import UserError


def pairs(
  config: TextConfig, path: str, *, field: str
) -> Iterator[tuple[str, str]]:
  """Yields sources and targets as they are; missing texts are blank."""
  rows = _load(config, path, field)
  if isinstance(rows.column_names, dict):
    names = ", ".join(f"{path}/{name}" for name in rows.column_names)
    raise UserError(f"{field}: {path} holds several sets; give one of {names}")
  wanted = [config.source, config.target]
  if "translation" in rows.column_names:
    rows = rows.flatten()
    wanted = [f"translation.{language}" for language in wanted]
  kinds = {
    name: getattr(feature, "dtype", type(feature).__name__)
    for name, feature in rows.features.items()
  }
  if not all("string" in kinds.get(name, "") for name in wanted):
    present = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    raise UserError(
      f"{field}: {path} has no columns of text {wanted[0]} and {wanted[1]};"
      f" there are {present}"
    )
  if not len(rows):
    raise UserError(f"{field}: {path} is empty")
  for batch in rows.iter(batch_size=1000):
    for source, target in zip(*(batch[name] for name in wanted)):
      yield source or "", target or ""


def _load(config: TextConfig, path: str, field: str) -> Any:
  try:
    import datasets
  except ImportError:
    raise UserError(
      "config.data.format: 'huggingface' needs the package datasets; install"
      " it with: pip install -e '.[hf]'"
    ) from None
  folder = Path(config.dir, path).expanduser()
  *name, split = path.split(":")
  try:
    if folder.is_dir() or not name:
      return datasets.load_from_disk(str(folder))
    return datasets.load_dataset(*name, split=split)
  except Exception as error:  # hubs and scripts raise errors of any type
    reason = str(error).strip().split("\n")[0].rstrip(".")
    raise UserError(
      f"{field}: {path} cannot be loaded ({type(error).__name__}: {reason});"
      " it must be NAME:SPLIT, NAME:CONFIG:SPLIT or a folder that save_to_disk"
      " wrote"
    ) from error
