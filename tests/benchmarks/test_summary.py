"""The picture of docs/performance.md is drawn from its table."""

from benchmarks import summary
from benchmarks.summary import Quantity

TABLE = """
# Title

| what | here | peer | ratio | limit |
|---|---|---|---|---|
| training | 7 tokens | 1 token | 6.4 | 12.5 |
| starting | 2 s | | | |
| decoding | 9 | 2 | 4.5 times | not known |

| another | ratio | limit |
|---|---|---|
| table | 1 | 1 |
"""


def test_rows_of_the_first_table_with_a_ratio_are_read():
  assert summary.quantities(TABLE) == [
    Quantity("training", 6.4, 12.5),
    Quantity("decoding", 4.5, None),
  ]


def test_the_figure_has_the_numbers_of_the_document(tmp_path):
  """A figure that is older than its table has other numbers."""
  rows = summary.quantities(summary.DOCUMENT.read_text())
  assert len(rows) > 10
  path = tmp_path / "figure.png"
  summary.draw(rows, path)
  for each in (path, summary.FIGURE):
    assert summary.numbers(each) == [list(row) for row in rows]
