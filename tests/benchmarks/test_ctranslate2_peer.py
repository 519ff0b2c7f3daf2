"""A Transformer converted for CTranslate2 makes the same predictions."""

import jax
import numpy as np
import pytest

from experiments import decoding
from experiments.data.batch import EOS, PAD, UNK
from experiments.decoding import Constraints
from tests.experiments.toys import transformer

pytest.importorskip("ctranslate2")


@pytest.mark.exhaustive
def test_greedy_predictions_equal_those_of_ctranslate2(tmp_path):
  from benchmarks.translation.ctranslate2_peer import CTranslate2, export

  model, length = transformer(30), 8
  rng = np.random.default_rng(0)
  source = rng.integers(4, 30, (20, 6)).astype(np.int32)
  source[:10, 3], source[:10, 4:], source[10:, 5] = EOS, PAD, EOS
  params = jax.jit(model.init)(jax.random.key(0), source, source)["params"]
  params = jax.tree.map(lambda leaf: 2 * leaf, params)

  @jax.jit
  def greedy(params, source):
    constraints = Constraints(banned=(UNK,))
    return decoding.greedy(
      model, params, source, max_length=length, constraints=constraints
    )

  ours = np.asarray(greedy(params, source))
  export(params, model.config, model.max_length, tmp_path)
  theirs, _ = CTranslate2(tmp_path, inter=1).predictions(
    [row[row != PAD] for row in source], beam_size=1, max_length=length
  )
  expected = [row[(row != PAD) & (row != EOS)].tolist() for row in ours]
  assert len({tuple(row) for row in expected}) > 5
  assert theirs == expected
