"""Tables of metrics by length."""

import pytest

from experiments.config import EvaluationConfig
from experiments.errors import UserError
from experiments.evaluation import report
from experiments.evaluation.evaluator import Evaluation


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


def test_results_of_other_files_with_the_same_name_are_kept(tmp_path):
  def write(*files):
    report.check_files(tmp_path, "x.en_beam_5", files)
    report.write_evaluation(
      *(tmp_path, "x.en", "step 5", empty),
      config=EvaluationConfig(),
      variant="_beam_5",
      files=files,
    )

  empty = Evaluation(
    metrics={},
    by_length=[],
    signatures={},
    predictions=[],
    search={},
    num_truncated=0,
    num_parameters=0,
    alignment_error_rates={},
  )
  write("/a/x.en", "/a/x.de")
  write("/a/x.en", "/a/x.de")
  path = tmp_path / "eval" / "x.en_beam_5.json"
  message = (
    "--source=/b/x.en: its results would replace those of /a/x.en and /a/x.de;"
    f" rename the file, or remove {path}"
  )
  with pytest.raises(UserError) as caught:
    write("/b/x.en", "/b/x.de")
  assert str(caught.value) == message
  path.unlink()
  write("/b/x.en", "/b/x.de")
  with pytest.raises(
    UserError, match=r"^the set x\.en_beam_5: its results would"
  ):
    write()


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
