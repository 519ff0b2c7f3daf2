"""The tables of results and targets, and the JSON file."""

import json
import pathlib
from collections.abc import Mapping, Sequence

from benchmarks.attention.measure import Entry, Row, Target


def table(sections: Mapping[str, Sequence[Row]]) -> str:
  """The results, a line for each contender.

  Milliseconds are medians; `x first` is the median over rounds of a time
  divided by that of the row's first contender; MiB are temporaries. Page faults
  are shown where they are many: then each call allocates memory from the
  operating system, which is slow.
  """
  lines = [
    f"{'section':<10}{'case':<38}{'direction':<18}{'contender':<24}"
    f"{'ms':>10}{'x first':>9}{'MiB':>9}  notes"
  ]
  for section, rows in sections.items():
    for row in rows:
      lines.append("")
      for number, entry in enumerate(row.entries):
        heads = (section, row.case, row.direction) if number == 0 else ("",) * 3
        lines.append(_line(heads, row, entry))
  return "\n".join(lines)


def _line(heads: Sequence[str], row: Row, entry: Entry) -> str:
  section, case, direction = heads
  memory = entry.temporary_bytes
  ms = "-" if entry.seconds is None else f"{entry.seconds * 1e3:.3f}"
  times = "-"
  if entry.samples:
    times = f"{row.ratio(entry.name, row.entries[0].name):.2f}"
  mib = "-" if memory is None else f"{memory / 2**20:.1f}"
  return (
    f"{section:<10}{case:<38}{direction:<18}{entry.name:<24}"
    f"{ms:>10}{times:>9}{mib:>9}  {_notes(entry.notes)}"
  ).rstrip()


def _notes(notes: Mapping[str, float]) -> str:
  parts = []
  if "gflops" in notes:
    share = notes["share_of_matmul"]
    parts.append(f"{notes['gflops']:.1f} GFLOP/s, {share:.0%} of matmul")
  if "tflops" in notes:
    parts.append(f"{notes['tflops']:.3g} TFLOP/s")
  if notes.get("page_faults", 0) >= 1000:
    parts.append(f"{notes['page_faults']:.0f} page faults per call")
  if "error" in notes:
    parts.append(f"largest error {notes['error']:.1e}")
  if "resident_mib_after" in notes:
    before, after = notes["resident_mib_before"], notes["resident_mib_after"]
    parts.append(f"resident {before:.0f} MiB, after a call {after:.0f}")
  return "; ".join(parts)


def targets_table(targets: Sequence[Target]) -> str:
  """The targets, a line each."""
  lines = [f"{'section':<10}{'value':>9}  {'goal':<11}{'':<13}target"]
  words = {True: "reached", False: "not reached", None: ""}
  for target in targets:
    sign = ">=" if target.at_least else "<="
    goal = "" if target.goal is None else f"{sign} {target.goal:.3g}"
    lines.append(
      f"{target.section:<10}{target.value:>9.3g}  {goal:<11}"
      f"{words[target.reached]:<13}{target.name}"
    )
  return "\n".join(lines)


def write(
  path: pathlib.Path,
  machine: Mapping[str, object],
  options: Mapping[str, object],
  sections: Mapping[str, Sequence[Row]],
  targets: Sequence[Target],
) -> None:
  """Writes the machine, the options, the rows and the targets as JSON."""
  document = {
    "machine": dict(machine),
    "settings": dict(options),
    "sections": {
      section: [_row(row) for row in rows] for section, rows in sections.items()
    },
    "targets": [
      {**target._asdict(), "reached": target.reached} for target in targets
    ],
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(document, indent=1) + "\n")


def _row(row: Row) -> dict[str, object]:
  """A row as JSON, without absent fields."""
  head = {
    "case": row.case,
    "direction": row.direction,
    "length": row.length,
    "flops": row.flops,
    "contenders": [_entry(row, entry) for entry in row.entries],
  }
  return _present(head)


def _entry(row: Row, entry: Entry) -> dict[str, object]:
  first = row.entries[0].name
  return _present(
    {
      "name": entry.name,
      "seconds": entry.seconds,
      "times_the_first": row.ratio(entry.name, first)
      if entry.samples
      else None,
      "temporary_bytes": entry.temporary_bytes,
      **entry.notes,
      "samples": list(entry.samples) or None,
    }
  )


def _present(fields: Mapping[str, object]) -> dict[str, object]:
  return {name: field for name, field in fields.items() if field is not None}
