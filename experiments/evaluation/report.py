"""Reports an evaluation: files in the run directory, and text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config import EvaluationConfig
from experiments.data.dataset import EvaluationSet
from experiments.errors import UserError
from experiments.evaluation.evaluator import NUM_BINS, Evaluation
from experiments.evaluation.metrics import CORPUS_NAMES, length_ranges
from experiments.run_directory import write_json, write_text

# The metrics that have means over rows, by what they are counted over.
_POOLED = {
  "token_accuracy": "tokens",
  "sequence_accuracy": "count",
  "loss": "tokens",
}


def write_evaluation(
  workdir: Path,
  split: str,
  checkpoint: str,
  evaluation: Evaluation,
  *,
  config: EvaluationConfig,  # of the run
  variant: str = "",  # the end of the names
  files: Sequence[str] = (),  # of source and target, if the set is of the user
) -> Path:
  """Writes eval/SPLIT.json, and the predictions as .txt; returns the first."""
  path = workdir / "eval" / f"{split}{variant}.json"
  write_json(
    path,
    {
      "split": split,
      **({"files": files} if files else {}),
      "checkpoint": checkpoint,
      "config": config.model_dump(mode="json"),
      "parameters": evaluation.num_parameters,
      "search": evaluation.search,
      "metrics": evaluation.metrics,
      "signatures": evaluation.signatures,
      "by_length": evaluation.by_length,
      "alignment_error_rates": evaluation.alignment_error_rates,
    },
  )
  predictions = "".join(f"{line}\n" for line in evaluation.predictions)
  write_text(path.with_name(f"{split}{variant}.txt"), predictions)
  return path


def check_files(workdir: Path, name: str, files: Sequence[str]) -> None:
  """Raises UserError if results of other files have this name."""
  path = workdir / "eval" / f"{name}.json"
  try:
    stored = json.loads(path.read_text(encoding="utf-8"))["files"]
  except (OSError, ValueError, LookupError):  # LookupError: an older version
    return
  if stored != list(files):
    given = f"--source={files[0]}" if files else f"the set {name}"
    raise UserError(
      f"{given}: its results would replace those of"
      f" {' and '.join(stored)}; rename the file, or remove {path}"
    )


def read_evaluation(
  workdir: Path,
  split: str,
  examples: EvaluationSet,
  settings: Mapping[str, Any],  # values that the file must have
) -> Evaluation | None:
  """Reads what `write_evaluation` wrote; None if it is missing or damaged."""
  path = workdir / "eval" / f"{split}.json"
  try:
    stored = json.loads(path.read_text(encoding="utf-8"))
    predictions = path.with_suffix(".txt").read_text(encoding="utf-8")
    evaluation = Evaluation(
      metrics=stored["metrics"],
      by_length=stored["by_length"],
      signatures=stored["signatures"],
      predictions=predictions.split("\n")[:-1],
      search=stored["search"],
      num_truncated=examples.num_truncated,
      num_parameters=stored["parameters"],
      alignment_error_rates=stored["alignment_error_rates"],
    )
    described(split, stored["checkpoint"], evaluation)  # has its metrics
  except (OSError, ValueError, TypeError, LookupError):
    return None
  is_whole = len(evaluation.predictions) == len(examples.batch.source)
  is_same = all(stored[name] == value for name, value in settings.items())
  return evaluation if is_whole and is_same else None


def described(split: str, checkpoint: str, evaluation: Evaluation) -> str:
  """Returns a line of metrics, and a table by length."""
  lines = [
    f"{split} ({search_name(evaluation)}, {checkpoint}): {summary(evaluation)}",
    table(evaluation.by_length),
  ]
  if evaluation.num_truncated:
    lines.append(
      f"{evaluation.num_truncated:,} of {len(evaluation.predictions):,} pairs"
      " are longer than the model reads, and were truncated"
    )
  if "chrf" in evaluation.signatures:
    lines += [f"{name}: {x}" for name, x in evaluation.signatures.items()]
  return "\n".join(lines)


def search_name(evaluation: Evaluation) -> str:
  """Returns "greedy", or "beam 5" for beam search with 5 hypotheses."""
  beam_size = evaluation.search["beam_size"]
  return "greedy" if beam_size == 1 else f"beam {beam_size}"


def summary(evaluation: Evaluation) -> str:
  """Returns the metrics of an evaluation in one line."""
  scores = evaluation.metrics
  parts = [
    f"token accuracy {scores['token_accuracy']:.2%}",
    f"sequence accuracy {scores['sequence_accuracy']:.2%}",
    f"BLEU {scores['bleu']:.2f}",
  ]
  if "chrf" in scores:
    parts.append(f"chrF {scores['chrf']:.2f}")
  if "alignment_error_rate" in scores:
    parts.append(f"alignment error {scores['alignment_error_rate']:.2%}")
  parts.append(f"loss {scores['loss']:.4f}")
  speed = f"({scores['sentences_per_second']:,.0f} sentences/s)"
  return f"{', '.join(parts)} {speed}"


def table(rows: list[dict[str, Any]]) -> str:
  """Formats `Evaluation.by_length`, pooled into at most ten rows."""
  columns = [name for name in CORPUS_NAMES if name in rows[0]]
  heading = "length    examples  token accuracy  sequence accuracy"
  lines = [heading + "".join(f"{CORPUS_NAMES[name]:>8}" for name in columns)]
  for row in pooled(rows):
    lines.append(
      f"{length_range(row):<8}{row['count']:>10}{row['token_accuracy']:>16.2%}"
      f"{row['sequence_accuracy']:>19.2%}"
      + "".join(f"{row[column]:>8.2f}" for column in columns)
    )
  return "\n".join(lines)


def length_range(row: Mapping[str, Any]) -> str:
  """Returns the source lengths of a row as text."""
  first, last = row["length"], row["to_length"]
  return str(first) if first == last else f"{first}-{last}"


def pooled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Merges adjacent lengths of a task into at most `NUM_BINS` rows."""
  if len(rows) <= NUM_BINS:
    return rows
  merged = []
  ends = rows[0]["length"], rows[-1]["to_length"]
  for first, last in length_ranges(*ends, NUM_BINS):
    chosen = [row for row in rows if first <= row["length"] <= last]
    if not chosen:
      continue
    row = {"length": first, "to_length": last}
    row["count"] = sum(each["count"] for each in chosen)
    for name, unit in _POOLED.items():
      if name in chosen[0]:
        values, weights = zip(*((each[name], each[unit]) for each in chosen))
        row[name] = np.average(values, weights=weights)
    merged.append(row)
  return merged
