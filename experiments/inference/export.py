"""Writes a run for programs that do not have this package."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from experiments import run_directory
from experiments.checkpoints import parameter_file
from experiments.checkpoints.restore_run import Restored
from experiments.config import TaskConfig
from experiments.data.batch import BOS, EOS, PAD
from experiments.data.text.dataset import SIDES, TOKENIZER, evaluation_files
from experiments.errors import UserError

PLATFORMS = ("cpu", "cuda", "tpu")
START, STEP, DECODING = "start.jax", "step.jax", "decoding.json"


class Shapes(NamedTuple):
  """The fixed sizes of an exported decoder.

  Attributes:
    batch_size: B, the number of sources.
    source_length: S, the number of tokens of a padded source.
    target_length: T, the largest number of steps.
  """

  batch_size: int
  source_length: int
  target_length: int


def export_parameters(restored: Restored, workdir: Path, out: Path) -> None:
  """Writes config.json, parameters, tokenizers and evaluation sets.

  The folder can be used like a run directory for everything except training.

  Args:
    restored: a run.
    workdir: its directory.
    out: the folder to write, which must not exist or be empty.

  Raises:
    UserError: if the folder is a file or has files.
  """
  if out.is_file():
    raise UserError(f"--out={out}: is a file; give the name of a folder")
  if out.exists() and any(out.iterdir()):
    raise UserError(f"--out={out}: has files; use another folder")
  run_directory.make_folder(out)
  config = restored.experiment.config
  run_directory.write_json(out / run_directory.CONFIG, config.model_dump())
  parameter_file.write(
    out / run_directory.PARAMETERS, restored.params, restored.checkpoint
  )
  if isinstance(config.data, TaskConfig):
    return
  files = [f"{TOKENIZER}/{side}.model" for side in SIDES]
  for name in (*files, *evaluation_files(config.data)):
    run_directory.make_folder((out / name).parent)
    run_directory.write_bytes(out / name, (workdir / name).read_bytes())


def export_decoding(restored: Restored, shapes: Shapes, out: Path) -> None:
  """Writes the decoder as two serialised JAX functions, and their description.

  `start(params, source)` returns the state of the decoder, a tuple of arrays;
  `step(params, state, token)` returns the next state, logits [B, V] and
  attention weights [B, P, S] of P heads. `params` maps the names of
  parameters.safetensors to its arrays. Both are compiled for CPU, CUDA and TPU.

  Args:
    restored: a run.
    shapes: the sizes that the functions accept.
    out: the folder of `export_parameters`.

  Raises:
    UserError: if the sizes exceed those of the model.
  """
  check_shapes(restored, shapes)
  experiment = restored.experiment
  start, step, params, source, state = _functions(
    experiment.model, restored.params, shapes
  )
  token = jax.ShapeDtypeStruct(shapes[:1], jnp.int32)
  for name, function, arguments in (
    (START, start, (params, source)),
    (STEP, step, (params, state, token)),
  ):
    exported = export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)
    run_directory.write_bytes(out / name, bytes(exported.serialize()))
  run_directory.write_json(
    out / DECODING,
    {
      **shapes._asdict(),
      "platforms": PLATFORMS,
      "source_vocabulary_size": experiment.data.source_vocabulary_size,
      "target_vocabulary_size": experiment.data.target_vocabulary_size,
      "padding": PAD,
      "start_of_sentence": BOS,
      "end_of_sentence": EOS,
    },
  )


def check_shapes(restored: Restored, shapes: Shapes) -> None:
  """Raises UserError if the sizes exceed those of the model."""
  longest = restored.experiment.data.max_length
  if max(shapes.source_length, shapes.target_length) > longest:
    raise UserError(
      f"--source_length={shapes.source_length},"
      f" --target_length={shapes.target_length}: the model was built for at"
      f" most {longest}"
    )


def _functions(model, like: Any, shapes: Shapes):
  """Start and step, whose states are tuples, and their abstract arguments."""
  names, structure = list(parameter_file.named(like)), jax.tree.structure(like)

  def variables(params):
    leaves = [params[name] for name in names]
    return {"params": jax.tree.unflatten(structure, leaves)}

  def begin(params, source):
    return model.apply(
      variables(params), source, shapes.target_length, method="start"
    )

  def start(params, source):
    return tuple(jax.tree.leaves(begin(params, source)))

  params = {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for name, leaf in parameter_file.named(like).items()
  }
  source = jax.ShapeDtypeStruct(shapes[:2], jnp.int32)
  begun = jax.eval_shape(begin, params, source)
  of_state = jax.tree.structure(begun)

  def step(params, state, token):
    memory, carry = jax.tree.unflatten(of_state, state)
    carry, logits, weights = model.apply(
      variables(params), memory, carry, token, method="step"
    )
    return tuple(jax.tree.leaves((memory, carry))), logits, weights

  return start, step, params, source, tuple(jax.tree.leaves(begun))
