"""Decodes with CTranslate2, with the weights and subwords of a trained run.

Needs `pip install ctranslate2`, the extra `bench`.
"""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import ctranslate2
import jax
import numpy as np
from ctranslate2.specs import TransformerSpec

from attention import positions
from experiments import inference
from experiments.config import TransformerConfig
from experiments.data.batch import PAD
from experiments.data.text.corpus import padded
from experiments.evaluation.metrics import CorpusMetrics

# The first token ids are PAD, BOS, EOS and UNK; the others are named by number.
_SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
_EPSILON = 1e-6  # of Flax's layer norms


@dataclasses.dataclass(frozen=True)
class CTranslate2:
  """A converted Transformer, decoded by `inter` workers of `intra` threads."""

  folder: pathlib.Path
  inter: int = 2
  intra: int = 1
  batch_size: int = 64

  def predictions(
    self, sources: Sequence[np.ndarray], *, beam_size: int, max_length: int
  ) -> tuple[list[list[int]], float]:
    """Token ids without EOS of sources [S] with EOS; seconds of decoding."""
    translator = ctranslate2.Translator(
      str(self.folder),
      compute_type="float32",
      inter_threads=self.inter,
      intra_threads=self.intra,
    )
    names = [[_name(token) for token in source] for source in sources]

    def translate(batch):
      return translator.translate_batch(
        batch,
        beam_size=beam_size,
        max_batch_size=self.batch_size,
        max_decoding_length=max_length,
        disable_unk=True,
        suppress_sequences=[[name] for name in ("<pad>", "<s>")],
      )

    translate(names[: self.batch_size])  # allocates memory
    begin = time.perf_counter()
    results = translate(names)
    seconds = time.perf_counter() - begin
    ids = {name: index for index, name in enumerate(_SPECIALS)}
    return [
      [ids[name] if name in ids else int(name) for name in result.hypotheses[0]]
      for result in results
    ], seconds


def export(
  params: Any, config: TransformerConfig, max_length: int, folder: pathlib.Path
) -> None:
  """Writes CTranslate2's files of a pre-norm Transformer's parameters.

  The Transformer has sinusoidal positions and one tied embedding.
  """
  params = jax.device_get(params)
  layers = config.encoder_layers, config.decoder_layers
  spec = TransformerSpec.from_config(layers, config.num_heads, pre_norm=True)
  table = params["embedding"]["embedding"]
  waves = np.asarray(positions.sinusoidal(max_length, config.model_size))
  spec.encoder.embeddings[0].weight = table
  spec.decoder.embeddings.weight = table
  spec.decoder.projection.weight = table
  sides = {"encoder": spec.encoder, "decoder": spec.decoder}
  for name, side in sides.items():
    side.position_encodings.encodings = waves
    _set_norm(side.layer_norm, params[f"{name}_norm"])
    for index, layer in enumerate(side.layer):
      _set_layer(layer, params[f"{name}_{index}"])
  names = [_name(token) for token in range(len(table))]
  spec.register_source_vocabulary(names)
  spec.register_target_vocabulary(names)
  spec.config.layer_norm_epsilon = _EPSILON
  spec.validate()
  spec.optimize(quantization="float32")
  folder.mkdir(parents=True, exist_ok=True)
  spec.save(str(folder))


def decoding_speed(workdir: pathlib.Path, beam_size: int) -> dict[str, float]:
  """Sentences per second and BLEU on the test set of a trained run."""
  experiment, params, _ = inference.restore(workdir)
  data, config = experiment.data, experiment.config
  assert isinstance(config.model, TransformerConfig)
  _, examples = inference.evaluation_set(experiment, "test")
  assert examples.text is not None
  sources = [row[row != PAD] for row in np.asarray(examples.batch.source)]
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    export(params, config.model, data.max_length, folder)
    rows, seconds = CTranslate2(folder).predictions(
      sources, beam_size=beam_size, max_length=data.max_length - 1
    )
  texts = data.target_text(
    padded([np.array(row, np.int32) for row in rows], data.max_length)
  )
  corpus = CorpusMetrics(config.evaluation, text=True)
  return {
    "sentences_per_second": len(sources) / seconds,
    "bleu": corpus.score(texts, examples.text.target)["bleu"],
  }


def _name(token: int) -> str:
  return _SPECIALS[token] if token < len(_SPECIALS) else str(token)


def _set_layer(layer, params) -> None:
  """Sets the parameters of an encoder or decoder layer."""
  attention = layer.self_attention
  _set_norm(attention.layer_norm, params["self_residual"]["layer_norm"])
  own = params["self_attention"]
  _set_linear(attention.linear[0], own, "query", "key", "value")
  _set_linear(attention.linear[1], own, "output")
  if "cross_attention" in params:
    attention, own = layer.attention, params["cross_attention"]
    _set_norm(attention.layer_norm, params["cross_residual"]["layer_norm"])
    _set_linear(attention.linear[0], own, "query")
    _set_linear(attention.linear[1], own, "key", "value")
    _set_linear(attention.linear[2], own, "output")
  norm = params["feed_forward_residual"]["layer_norm"]
  _set_norm(layer.ffn.layer_norm, norm)
  for index, linear in enumerate((layer.ffn.linear_0, layer.ffn.linear_1)):
    dense = params["feed_forward"][f"Dense_{index}"]
    linear.weight, linear.bias = _rows(dense["kernel"].T), dense["bias"]


def _set_linear(linear, attention, *names: str) -> None:
  """Sets projections of an attention module, one below the other."""
  kernels, biases = [], []
  for name in names:
    kernel = attention[f"{name}_projection"]["kernel"]
    inputs = kernel.ndim - 1 if name == "output" else 1
    size = int(np.prod(kernel.shape[:inputs]))
    kernels.append(kernel.reshape(size, -1).T)
    biases.append(attention[f"{name}_projection"]["bias"].reshape(-1))
  linear.weight = _rows(np.concatenate(kernels))
  linear.bias = np.concatenate(biases)


def _set_norm(norm, params) -> None:
  norm.gamma, norm.beta = params["scale"], params["bias"]


def _rows(matrix: np.ndarray) -> np.ndarray:
  """The matrix in row-major order, which CTranslate2 writes as it is."""
  return np.ascontiguousarray(matrix)
