"""Converts a trained Transformer to JoeyNMT's parameter names and layouts.

Both then decode with the same weights and subwords, and should reach the same
BLEU.
"""

import pathlib
import shutil

import jax
import numpy as np
import sentencepiece

from attention import positions
from experiments.data.batch import BOS, EOS, PAD, UNK
from experiments.inference import Restored

# Our parameters' names, and JoeyNMT's.
_TOP = {
  "encoder_norm": "encoder.layer_norm",
  "decoder_norm": "decoder.layer_norm",
}
_LAYER = {
  "encoder": {
    "self_attention": "src_src_att",
    "self_residual/layer_norm": "layer_norm",
    "feed_forward_residual/layer_norm": "feed_forward.layer_norm",
    "feed_forward/Dense_0": "feed_forward.pwff_layer.0",
    "feed_forward/Dense_1": "feed_forward.pwff_layer.3",
  },
  "decoder": {
    "self_attention": "trg_trg_att",
    "self_residual/layer_norm": "x_layer_norm",
    "cross_attention": "src_trg_att",
    "cross_residual/layer_norm": "dec_layer_norm",
    "feed_forward_residual/layer_norm": "feed_forward.layer_norm",
    "feed_forward/Dense_0": "feed_forward.pwff_layer.0",
    "feed_forward/Dense_1": "feed_forward.pwff_layer.3",
  },
}
_PROJECTIONS = {
  f"{name}_projection": f"{ours}_layer"
  for name, ours in (
    ("query", "q"),
    ("key", "k"),
    ("value", "v"),
    ("output", "output"),
  )
}
# JoeyNMT's first four tokens: unknown, padding, begin, end.
_SPECIALS = [UNK, PAD, BOS, EOS]
_POSITIONS = 5000


def export(restored: Restored, workdir: pathlib.Path, folder: pathlib.Path):
  """Writes trained.npz, joint.model and vocab.txt of a run for JoeyNMT.

  The run is one of a pre-norm Transformer with sinusoidal positions and a joint
  vocabulary.
  """
  folder.mkdir(parents=True, exist_ok=True)
  model = folder / "joint.model"
  shutil.copy(workdir / "tokenizer" / "source.model", model)
  pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
  words = [pieces.id_to_piece(i) for i in range(len(_SPECIALS), len(pieces))]
  (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
  layers = {
    "encoder": restored.experiment.config.model.encoder_layers,
    "decoder": restored.experiment.config.model.decoder_layers,
  }
  arrays: dict = _renamed(jax.device_get(restored.params), layers)
  np.savez(folder / "trained.npz", **arrays)


def _renamed(params, layers: dict[str, int]) -> dict[str, np.ndarray]:
  table = params["embedding"]["embedding"]
  table = np.concatenate([table[_SPECIALS], table[len(_SPECIALS) :]])
  waves = positions.sinusoidal(_POSITIONS, table.shape[1])[None]
  found = {
    "src_embed.lut.weight": table,
    "trg_embed.lut.weight": table,
    "decoder.output_layer.weight": table,
    "encoder.pe.pe": np.asarray(waves),
    "decoder.pe.pe": np.asarray(waves),
  }
  for ours, theirs in _TOP.items():
    found |= _module(params[ours], theirs)
  for side, parts in _LAYER.items():
    for index in range(layers[side]):
      for ours, theirs in parts.items():
        module = params[f"{side}_{index}"]
        for name in ours.split("/"):
          module = module[name]
        found |= _module(module, f"{side}.layers.{index}.{theirs}")
  return found


def _module(module, name: str) -> dict[str, np.ndarray]:
  """The arrays of a norm, of a dense layer, or of attention's projections."""
  found: dict[str, np.ndarray] = {}
  for key, value in module.items():
    if key in _PROJECTIONS:
      found |= _module(value, f"{name}.{_PROJECTIONS[key]}")
    elif key == "kernel":
      found[f"{name}.weight"] = _matrix(value, name).T
    else:
      kind = "bias" if key == "bias" else "weight"
      found[f"{name}.{kind}"] = value.reshape(-1)
  return found


def _matrix(kernel: np.ndarray, name: str) -> np.ndarray:
  """A kernel [inputs, outputs], with the head axis flattened."""
  if name.endswith("output_layer"):
    return kernel.reshape(-1, kernel.shape[-1])
  return kernel.reshape(kernel.shape[0], -1)
