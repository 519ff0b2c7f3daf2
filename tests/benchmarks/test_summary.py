"""The picture of docs/performance.md shows the numbers of its table."""

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


def test_the_figure_is_written(tmp_path):
  path = tmp_path / "figure.png"
  summary.draw(summary.quantities(TABLE), path)
  assert path.read_bytes().startswith(b"\x89PNG")
