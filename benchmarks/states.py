"""How large a recurrent network's states are, and so their dot products.

    python -m benchmarks.states RUN...

Of each run, untrained and trained: the root mean square of a feature of the
encoder's states and of the decoder's queries, and by how much the largest dot
product of a query stands above their mean, as it is and divided by sqrt(D),
while the model follows 128 references of the validation set. A softmax can be
no sharper than such a gap allows.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, logging

from experiments import inference
from experiments.data.batch import BOS, PAD
from experiments.experiment import Experiment
from experiments.models.rnn.seq2seq import Seq2Seq

_NUM_EXAMPLES = 128


class Sizes(NamedTuple):
  """What the states of a model are like.

  Attributes:
    encoder: root mean square of a feature.
    query: likewise.
    gap: mean over queries of their largest dot product less their mean.
    num_features: D.
  """

  encoder: float
  query: float
  gap: float
  num_features: int


def measure(experiment: Experiment, params: Any) -> Sizes:
  """Measures the states of a model.

  Args:
    experiment: of an RNN whose encoder states and queries are of equal size.
    params: of its model.

  Returns:
    Their sizes.
  """
  batch = experiment.data.evaluation_set("validation").batch
  source = np.asarray(batch.source[:_NUM_EXAMPLES])
  target = np.asarray(batch.target[:_NUM_EXAMPLES])
  before = np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
  states, queries = _states_and_queries(
    experiment, {"params": params}, source, before
  )
  asked, there = before != PAD, source != PAD
  products = np.einsum("btd,bsd->bts", queries, states)
  products = np.where(there[:, None], products, np.nan)[asked]
  gaps = np.nanmax(products, -1) - np.nanmean(products, -1)
  return Sizes(
    encoder=_root_mean_square(states[there]),
    query=_root_mean_square(queries[asked]),
    gap=float(np.mean(gaps)),
    num_features=states.shape[-1],
  )


def _states_and_queries(experiment: Experiment, variables, source, tokens):
  """[B, S, D] of the encoder, [B, T, D] of the decoder that reads tokens."""
  apply = jax.jit(
    experiment.model.apply, static_argnames=("method", "max_length")
  )
  memory, carry = apply(variables, source, max_length=0, method="start")
  wiring, queries = experiment.model.wiring, []
  for token in tokens.T:
    last = carry
    carry, *_ = apply(variables, memory, carry, token, method="step")
    asking = last if wiring.order == "bahdanau" else carry
    queries.append(asking.states[-1][0])
  return jax.device_get((memory.values, jnp.stack(queries, axis=1)))


def _root_mean_square(array) -> float:
  return float(np.sqrt(np.mean(np.square(array))))


def main(arguments) -> None:
  """Measures and prints."""
  logging.set_verbosity(logging.ERROR)
  if not arguments[1:]:
    sys.exit("missing RUN...; give directories of finished runs")
  print(f"{'encoder':>9}{'query':>9}{'gap':>9}{'/ sqrt(D)':>11}")
  for workdir in map(Path, arguments[1:]):
    experiment, trained, _ = inference.restore(workdir)
    if not isinstance(experiment.model, Seq2Seq):
      sys.exit(f"{workdir}: a Transformer has no such states")
    stages = {
      "untrained": experiment.initial_state().params,
      "trained": trained,
    }
    for stage, params in stages.items():
      sizes = measure(experiment, params)
      print(
        f"{sizes.encoder:>9.2f}{sizes.query:>9.2f}{sizes.gap:>9.1f}"
        f"{sizes.gap / sizes.num_features**0.5:>11.2f}  {workdir}, {stage}"
      )


if __name__ == "__main__":
  app.run(main)
