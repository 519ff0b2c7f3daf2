"""The JSON file of costs, and the table of docs/compiled_programs.md."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from benchmarks.attention.settings import version

Results = dict[str, dict[str, Any]]  # fields of a cost, by case
_BEGIN, _END = "<!-- accelerators: begin -->", "<!-- accelerators: end -->"
_PALLAS = ("pallas/", "long/", "peers/splash/")
_PACKAGES = ("jax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def read(path: pathlib.Path) -> Results:
  """The results of earlier runs; none without a file."""
  return json.loads(path.read_text())["cases"] if path.exists() else {}


def write(path: pathlib.Path, target: str, results: Results) -> None:
  """Writes results, sorted by name."""
  document = {
    "title": "compiled, not run",
    "target": target,
    "versions": {name: version(name) for name in _PACKAGES},
    "cases": dict(sorted(results.items())),
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix(".tmp")
  temporary.write_text(json.dumps(document, indent=1) + "\n")
  temporary.replace(path)


def line(name: str, result: dict[str, Any]) -> str:
  """A result for the terminal."""
  if "error" in result:
    return f"{name}: {result['error']}"
  moved = f", {_moved(result)}" if result["collectives"] else ""
  return (
    f"{name}: {result['kernels']:,} kernels,"
    f" {_mebibytes(result['traffic'])} MiB of traffic,"
    f" {_mebibytes(result['temporaries'])} MiB of temporaries{moved}, estimate"
    f" {1e3 * result['seconds']:.3g} ms; compiled in"
    f" {result['compile_seconds']:.0f} s"
  )


def tables(by_target: dict[str, Results]) -> str:
  """Markdown: the costs of all cases, and the bytes that a chip receives."""
  names = sorted({name for results in by_target.values() for name in results})
  header = ["compiled, not run"]
  for target in by_target:
    header += [f"{target}: kernels", "traffic, MiB", "temporaries, MiB"]
    header += ["ms", "compilation, s"]
  rows = [header]
  for name in names:
    row = [name]
    for results in by_target.values():
      row += _columns(name, results.get(name))
    rows.append(row)
  moved = [["compiled, not run", *by_target]]
  for name in names:
    cells = [_moved(results.get(name)) for results in by_target.values()]
    if any(cells):
      moved.append([name, *cells])
  return f"{_markdown(rows)}\n\n{_markdown(moved)}"


def _markdown(rows: list[list[str]]) -> str:
  header, *rest = rows
  rows = [header, ["---"] * len(header), *rest]
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_document(path: pathlib.Path, text: str) -> None:
  """Replaces what the document contains between the markers."""
  document = path.read_text()
  before, _, rest = document.partition(_BEGIN)
  _, end, after = rest.partition(_END)
  if not end:
    raise ValueError(f"{path} does not contain {_BEGIN} and {_END}")
  path.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}")


def _columns(name: str, result: dict[str, Any] | None) -> Iterable[str]:
  if result is None:
    return [""] * 5
  if "error" in result:
    return [result["error"].partition(":")[0], *[""] * 4]
  # Estimates lack the arithmetic of Pallas kernels.
  has_estimate = not name.startswith(_PALLAS)
  return [
    f"{result['kernels']:,}",
    _mebibytes(result["traffic"]),
    _mebibytes(result["temporaries"]),
    f"{1e3 * result['seconds']:.3g}" if has_estimate else "",
    f"{result['compile_seconds']:.0f}",
  ]


def _moved(result: dict[str, Any] | None) -> str:
  """The collectives of a program, and the bytes that they receive."""
  found = {} if result is None else result.get("collectives", {})
  return ", ".join(
    f"{count:,} {kind} ({_mebibytes(size)} MiB)"
    for kind, (count, size) in found.items()
  )


def _mebibytes(size: int) -> str:
  mebibytes = size / 2**20
  return f"{mebibytes:,.0f}" if mebibytes >= 10 else f"{mebibytes:.1f}"
