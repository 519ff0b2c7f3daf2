"""The evaluation at the end of a run uses what training has in memory."""

import pytest

from experiments.checkpoints import read
from experiments.evaluation import evaluator
from experiments.training import loop
from tests.experiments.states import metrics, results, tiny_run


@pytest.mark.exhaustive
def test_a_complete_run_reads_no_checkpoint_and_validates_once_at_its_end(
  tmp_path, monkeypatch
):
  config = tiny_run(steps=6)
  config.evaluation.beam_size = 1
  reads, evaluations = [], []
  restore, score = read._restore_parameters, evaluator.metrics.score

  def counted_restore(manager, step, like):
    reads.append(step)
    return restore(manager, step, like)

  def counted_score(*args):
    evaluations.append(1)
    return score(*args)

  monkeypatch.setattr(read, "_restore_parameters", counted_restore)
  monkeypatch.setattr(evaluator.metrics, "score", counted_score)
  assert loop.train_and_evaluate(config, tmp_path)
  assert not reads
  assert len(evaluations) == 1
  (validation,) = metrics(tmp_path, "validation")
  final = results(tmp_path)["validation.json"]["metrics"]
  assert final["loss"] == validation["loss"]
  rate = final.pop("alignment_error_rate")
  assert 0 <= rate <= 1
  assert final == {
    name: value
    for name, value in validation.items()
    if name not in ("step", "split")
  }
  # A second call keeps the results, unless they are of other settings.
  assert loop.train_and_evaluate(config, tmp_path)
  assert len(evaluations) == 1
  path = tmp_path / "eval" / "validation.json"
  stored = path.read_text()
  path.write_text(stored.replace('"beam_size": 1', '"beam_size": 2'))
  assert loop.train_and_evaluate(config, tmp_path)
  assert len(evaluations) == 2
  again = results(tmp_path)["validation.json"]["metrics"]
  assert again == final | {"alignment_error_rate": rate}
