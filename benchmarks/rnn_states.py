"""Measures the scale of an RNN's states and of their dot products.

    python -m benchmarks.rnn_states RUN...

For each run directory, with untrained and with trained parameters: the root
mean square of a feature of the encoder states and of the decoder's queries; and
the gap between the largest dot product of a query and the mean of its dot
products, as it is and divided by sqrt(D). The gap bounds how sharp the softmax
can be. The decoder is teacher-forced on 128 examples of the validation set.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from experiments import cli, inference
from experiments.data.batch import BOS, PAD
from experiments.errors import UserError
from experiments.experiment import Experiment
from experiments.models.rnn.seq2seq import Seq2Seq

_NUM_EXAMPLES = 128


class Sizes(NamedTuple):
  """The scale of encoder states and queries, in root mean squares.

  `gap` is the largest dot product of a query minus their mean, averaged over
  queries of `num_features` features.
  """

  encoder: float
  query: float
  gap: float
  num_features: int


def measure(experiment: Experiment, params: Any) -> Sizes:
  """Measures an RNN whose encoder states and queries have equal sizes."""
  batch = experiment.data.evaluation_set("validation").batch
  source = np.asarray(batch.source[:_NUM_EXAMPLES])
  target = np.asarray(batch.target[:_NUM_EXAMPLES])
  inputs = np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
  states, queries = _states_and_queries(
    experiment, {"params": params}, source, inputs
  )
  is_input, is_source = inputs != PAD, source != PAD
  products = np.einsum("btd,bsd->bts", queries, states)
  products = np.where(is_source[:, None], products, np.nan)[is_input]
  gaps = np.nanmax(products, -1) - np.nanmean(products, -1)
  return Sizes(
    encoder=_root_mean_square(states[is_source]),
    query=_root_mean_square(queries[is_input]),
    gap=float(np.mean(gaps)),
    num_features=states.shape[-1],
  )


def _states_and_queries(experiment: Experiment, variables, source, tokens):
  """[B, S, D] encoder states, and [B, T, D] queries for the input tokens."""
  apply = jax.jit(
    experiment.model.apply, static_argnames=("method", "max_length")
  )
  memory, carry = apply(variables, source, max_length=0, method="start")
  order, queries = experiment.model.config.order, []
  for token in tokens.T:
    previous = carry
    carry, *_ = apply(variables, memory, carry, token, method="step")
    query_carry = previous if order == "bahdanau" else carry
    queries.append(query_carry.states[-1][0])
  return jax.device_get((memory.values, jnp.stack(queries, axis=1)))


def _root_mean_square(array) -> float:
  return float(np.sqrt(np.mean(np.square(array))))


def main(*workdirs: str) -> None:
  """Prints a table of all runs."""
  logging.set_verbosity(logging.ERROR)
  print(f"{'encoder':>9}{'query':>9}{'gap':>9}{'/ sqrt(D)':>11}")
  for workdir in map(Path, workdirs):
    experiment, trained, _ = inference.restore(workdir)
    if not isinstance(experiment.model, Seq2Seq):
      raise UserError(
        f"{workdir}: the model is a Transformer; give a run of an RNN"
      )
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
  cli.run(main, positional=("RUN...",))
