"""Reports an evaluation: files in the run directory, and text."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.evaluation.evaluator import NUM_BINS, Evaluation
from experiments.run_directory import write_json

_COLUMNS = {"bleu": "BLEU", "chrf": "chrF"}


def write_evaluation(
  workdir: Path, split: str, used: str, evaluation: Evaluation
) -> None:
  """Writes eval/SPLIT.json, and the predictions as eval/SPLIT.txt."""
  write_json(
    workdir / "eval" / f"{split}.json",
    {
      "split": split,
      "checkpoint": used,
      "parameters": evaluation.num_parameters,
      "search": evaluation.search,
      "metrics": evaluation.metrics,
      "signatures": evaluation.signatures,
      "by_length": evaluation.by_length,
      "alignment_error_rates": evaluation.alignment_error_rates,
    },
  )
  predictions = "".join(f"{line}\n" for line in evaluation.predictions)
  path = workdir / "eval" / f"{split}.txt"
  path.write_text(predictions, encoding="utf-8")


def described(split: str, evaluation: Evaluation) -> str:
  """Returns a line of metrics, and a table by length."""
  lines = [f"{split}: {summary(evaluation)}", table(evaluation.by_length)]
  if evaluation.num_truncated:
    lines.append(
      f"{evaluation.num_truncated:,} of {len(evaluation.predictions):,} pairs"
      " are longer than the model reads, and were truncated"
    )
  if "chrf" in evaluation.signatures:
    lines += [f"{name}: {x}" for name, x in evaluation.signatures.items()]
  return "\n".join(lines)


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


def table(rows: list[dict[str, Any]], *, num_bins: int = NUM_BINS) -> str:
  """Formats `Evaluation.by_length`; tasks are pooled into `num_bins` rows."""
  columns = [name for name in _COLUMNS if name in rows[0]]
  heading = "length    examples  token accuracy  sequence accuracy"
  lines = [heading + "".join(f"{_COLUMNS[name]:>8}" for name in columns)]
  for row in rows if columns else pooled(rows, num_bins):
    first, last = row["length"], row["to_length"]
    name = str(first) if first == last else f"{first}-{last}"
    lines.append(
      f"{name:<8}{row['count']:>10}{row['token_accuracy']:>16.2%}"
      f"{row['sequence_accuracy']:>19.2%}"
      + "".join(f"{row[column]:>8.2f}" for column in columns)
    )
  return "\n".join(lines)


def pooled(rows: list[dict[str, Any]], num_bins: int) -> list[dict[str, Any]]:
  """Merges adjacent lengths of a task into at most `num_bins` rows."""
  low, high = rows[0]["length"], rows[-1]["to_length"]
  width = max(1, -(-(high - low + 1) // num_bins))
  merged = []
  for first in range(low, high + 1, width):
    chosen = [row for row in rows if first <= row["length"] < first + width]
    if not chosen:
      continue
    tokens = [row["tokens"] for row in chosen]
    counts = [row["count"] for row in chosen]
    weights = {
      "token_accuracy": tokens,
      "sequence_accuracy": counts,
      "loss": tokens,
    }
    means = {
      name: np.average([row[name] for row in chosen], weights=each)
      for name, each in weights.items()
      if name in chosen[0]
    }
    last = min(first + width - 1, high)
    merged.append(
      {"length": first, "to_length": last, "count": sum(counts), **means}
    )
  return merged
