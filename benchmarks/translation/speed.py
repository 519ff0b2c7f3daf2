"""Our training speed, from text in memory to updated parameters; decoding."""

import math
import time
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks.translation.flops import product_flops
from experiments import inference
from experiments.config import parse
from experiments.data import pipeline
from experiments.data.text.corpus import BucketedBatches
from experiments.distributed import mesh
from experiments.evaluation.search import configured_search
from experiments.experiment import make_experiment


def training_speed(
  config: ConfigDict, workdir: Path, num_steps: int
) -> dict[str, float]:
  """Times training steps, after every batch shape has been compiled.

  The tokens per second are those of targets, EOS included, as JoeyNMT counts;
  the positions also include padding; gigaflops are those of matrix products per
  second. `workdir` is for the tokenizers.
  """
  experiment = make_experiment(parse(config.to_dict()), workdir, train=True)
  batches = experiment.training_batches()
  assert isinstance(batches, BucketedBatches)
  state = experiment.initial_state()
  train_step, traced = (
    experiment.train_step(state),
    experiment.jitted_step(state),
  )
  flops: dict[tuple, float] = {}
  index = 0
  while len(flops) < len(batches.shapes) and index < 2000:
    batch = mesh.shard_batch(batches[index], experiment.mesh)
    if _shapes(batch) not in flops:
      with jax.set_mesh(experiment.mesh):
        program = jax.make_jaxpr(traced)(state, batch)
      flops[_shapes(batch)] = product_flops(program.jaxpr)
      state, _ = train_step(state, batch)
    index += 1
  stream = pipeline.Stream(batches, num_steps)
  tokens, positions, work = [], 0, 0.0
  jax.block_until_ready(state)
  begin = time.perf_counter()
  for batch in stream:
    state, metrics = train_step(state, mesh.shard_batch(batch, experiment.mesh))
    tokens.append(metrics["tokens"])
    positions += batch.target.size
    work += flops.get(_shapes(batch), math.nan)
  jax.block_until_ready(state)
  seconds = time.perf_counter() - begin
  return {
    "tokens_per_second": float(np.sum(jax.device_get(tokens))) / seconds,
    "positions_per_second": positions / seconds,
    "milliseconds": 1e3 * seconds / num_steps,
    "gigaflops": work / seconds / 1e9,
    "padding": batches.padding(),
  }


def decoding_speed(workdir: Path, beam_size: int) -> dict[str, float]:
  """Sentences per second and BLEU on the test set of a trained run."""
  restored = inference.restore(workdir)
  search = configured_search(restored.experiment, beam_size=beam_size)
  _, examples = inference.evaluation_set(restored.experiment, "test")
  scores = inference.evaluate(restored, examples, search).metrics
  return {name: scores[name] for name in ("sentences_per_second", "bleu")}


def _shapes(batch) -> tuple:
  return tuple(part.shape for part in batch)


def machine_gigaflops(size: int = 2048, repeats: int = 10) -> float:
  """The best rate of a float32 matrix product over several repeats."""
  matrix = jax.numpy.ones((size, size))
  product = jax.jit(lambda x: x @ x)
  jax.block_until_ready(product(matrix))
  best = math.inf
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(product(matrix))
    best = min(best, time.perf_counter() - begin)
  return 2 * size**3 / best / 1e9
