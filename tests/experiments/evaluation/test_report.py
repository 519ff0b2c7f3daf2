"""Tables of metrics by length."""

from experiments.evaluation import report


def test_the_table_pools_lengths_by_their_tokens():
  rows = [
    {"length": n, "to_length": n, "count": 2, "tokens": 2 * n,
     "token_accuracy": 1.0 * (n > 1), "sequence_accuracy": 0.5}
    for n in range(1, 21)
  ]  # fmt: skip
  lines = report.table(rows).splitlines()
  assert len(lines) == 11
  assert lines[1].split() == ["1-2", "4", "66.67%", "50.00%"]
  assert lines[-1].split()[0] == "19-20"


def test_the_table_of_text_has_the_ranges_that_were_judged():
  rows = [
    {"length": first, "to_length": last, "count": 2, "tokens": 9,
     "token_accuracy": 0.5, "sequence_accuracy": 0.25, "bleu": 12.345,
     "chrf": 50.0}
    for first, last in ((1, 4), (5, 8), (9, 9))
  ]  # fmt: skip
  lines = report.table(rows).splitlines()
  assert lines[0].split()[-2:] == ["BLEU", "chrF"]
  assert lines[1].split() == [
    "1-4", "2", "50.00%", "25.00%", "12.35", "50.00",
  ]  # fmt: skip
  assert [line.split()[0] for line in lines[1:]] == ["1-4", "5-8", "9"]
