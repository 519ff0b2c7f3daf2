"""Parameters as a safetensors file, without a training state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from experiments.distributed.mesh import place
from experiments.distributed.sharding import path_name
from experiments.errors import UserError
from experiments.run_directory import LocalFiles, write_bytes

_STEPS = "checkpoint"  # the key of the description in the file's metadata


def named(params: Any) -> dict[str, Any]:
  """Returns the leaves by path, as in "decoder_0/self_attention/kernel"."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {path_name(path): leaf for path, leaf in leaves}


def write(path: Path, params: Any, checkpoint: str) -> None:
  """Writes parameters and a description of their checkpoints."""
  arrays = {
    name: np.ascontiguousarray(leaf)
    for name, leaf in named(jax.device_get(params)).items()
  }
  content = safetensors.numpy.save(arrays, metadata={_STEPS: checkpoint})
  write_bytes(path, content)


def read(path: Path) -> tuple[dict[str, np.ndarray], str]:
  """Returns the arrays of a file by name, and the description."""
  try:
    local = LocalFiles(path.parent, [path.name])
    with safe_open(local.path / path.name, framework="numpy") as file:
      checkpoint = (file.metadata() or {}).get(_STEPS, "")
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  except (SafetensorError, OSError) as error:
    raise UserError(f"{path}: cannot be read ({error})") from error
  return arrays, checkpoint


def restore(path: Path, like: Any) -> tuple[Any, str]:
  """Reads the parameters of a model, with the shardings of `like`."""
  arrays, checkpoint = read(path)
  wanted = named(like)
  problems = [
    *(f"lacks {name}" for name in wanted.keys() - arrays.keys()),
    *(f"has {name}, unknown to it" for name in arrays.keys() - wanted.keys()),
    *(
      f"{name} has shape {arrays[name].shape}, not {wanted[name].shape}"
      for name in of_other_shape(arrays, wanted)
    ),
  ]
  if problems:
    raise UserError(
      f"{path}: does not fit the model of config.json: {min(problems)}"
    )
  leaves, structure = jax.tree.flatten(like)
  placed = [
    place(arrays[name], leaf.sharding) for name, leaf in zip(wanted, leaves)
  ]
  return jax.tree.unflatten(structure, placed), checkpoint


def of_other_shape(
  found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> list[str]:
  """Returns the names of arrays that have another shape in another model."""
  both = [name for name in wanted if name in found]
  return [name for name in both if found[name].shape != wanted[name].shape]
