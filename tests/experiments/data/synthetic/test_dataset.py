"""Every dataset gives the same batches in any order and to any process."""

import jax
import numpy as np
import pytest

from configs import base
from experiments.config import TrainConfig, parse
from experiments.data import pipeline
from experiments.data.batch import EOS, PAD
from experiments.data.dataset import BatchShard
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.data.text import prepare
from experiments.errors import UserError
from experiments.experiment import make_experiment
from tests.experiments.conftest import make_tiny, make_tiny_translation


@pytest.fixture(scope="module")
def datasets(corpus, tmp_path_factory):
  """One of each kind."""
  task = parse(make_tiny().to_dict()).data
  config = make_tiny_translation(corpus)
  for side in ("source_tokenizer", "target_tokenizer"):
    config.data[side] = base.tokenizer("unigram", 60)
  config.data.max_length = 40
  text = parse(config.to_dict()).data
  workdir = tmp_path_factory.mktemp("text")
  return {
    "task": SyntheticDataset(task),
    "text": prepare.prepare(text, workdir),
  }


ALONE = BatchShard()


@pytest.fixture(params=["task", "text"])
def make_batches(request, datasets):
  """Returns a function that makes the batches of one process."""
  data = datasets[request.param]
  unit = {"task": "examples", "text": "tokens"}[request.param]
  size = {"task": 24, "text": 300}[request.param]

  def make(shard=ALONE, multiple=1, seed=0):
    train = TrainConfig(batch_size=size, batch_unit=unit, row_multiple=multiple)
    return data.training_batches(train, seed=seed, shard=shard)

  return make


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_make_up_the_global_batch(count, make_batches):
  whole = make_batches(multiple=6)
  parts = [
    make_batches(BatchShard((part,), count), multiple=6)
    for part in range(count)
  ]
  for step in range(12):
    shares = [part[step] for part in parts]
    assert len({share.source.shape for share in shares}) == 1
    joined = jax.tree.map(lambda *rows: np.concatenate(rows), *shares)
    assert len(joined.source) % 6 == 0
    jax.tree.map(np.testing.assert_array_equal, joined, whole[step])


@pytest.mark.parametrize(("rows", "count"), [(12, 1), (12, 3), (12, 12)])
def test_shards_hold_every_row_once_in_order(rows, count):
  shares = [BatchShard((part,), count).rows(rows) for part in range(count)]
  assert {len(share) for share in shares} == {rows // count}
  np.testing.assert_array_equal(np.concatenate(shares), np.arange(rows))


def test_batches_do_not_depend_on_the_order_of_reading(make_batches):
  forwards, backwards = make_batches(), make_batches()
  expected = [forwards[step] for step in range(20)]
  for step in (19, 0, 7, 7, 18, 3):
    jax.tree.map(np.testing.assert_array_equal, backwards[step], expected[step])
  other = make_batches(seed=1)[0]
  assert other.source.shape != expected[0].source.shape or (
    (other.source != expected[0].source).any()
  )


@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_stream_continues_at_its_position(stop, make_batches):
  batches = make_batches()
  stream = pipeline.Stream(batches, num_steps=9)
  for _ in range(stop):
    next(stream)
  position = dict(stream.get_state())
  resumed = pipeline.Stream(make_batches(), num_steps=9)
  resumed.set_state(position)
  rest = list(resumed)
  assert len(rest) == 9 - stop
  for step, batch in enumerate(rest, stop):
    jax.tree.map(np.testing.assert_array_equal, batch, batches[step])


def test_batches_divide_over_devices_and_accumulation(corpus, tmp_path):
  config = make_tiny_translation(corpus)
  config.train.update(accumulation=3, batch_size=60)
  config.mesh.update(data=2, fsdp=2)
  config.train.row_multiple = 12
  typed = parse(config.to_dict())
  experiment = make_experiment(typed, tmp_path, train=True)
  batches = experiment.training_batches()
  for step in range(6):
    assert len(batches[step].source) % 12 == 0
  config.train.row_multiple = 8
  typed = parse(config.to_dict())
  with pytest.raises(
    UserError, match=r"row_multiple: 8 rows .* multiple of 12"
  ):
    make_experiment(typed, tmp_path, train=True).training_batches()


def test_evaluation_sets_decode_to_their_text(datasets):
  examples = datasets["text"].evaluation_set("test")
  for row in (*examples.batch.source, *examples.batch.target):
    (end,) = np.flatnonzero(row == EOS)
    assert (row[end + 1 :] == PAD).all()
    assert (row[:end] != PAD).all()
  texts = datasets["text"].target_text(examples.batch.target)
  assert texts == list(examples.text.target)
  task = datasets["task"].evaluation_set("longer")
  assert task.text is None
  assert task.batch.source.shape[1] == datasets["task"].max_length
