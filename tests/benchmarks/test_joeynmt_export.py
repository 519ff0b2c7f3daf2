"""Parameters exported to JoeyNMT equal ours in PyTorch's layout."""

import jax
import numpy as np
import pytest

from benchmarks.translation import joeynmt_export
from experiments.data.batch import PAD, UNK
from tests.experiments.toys import transformer


@pytest.mark.exhaustive
def test_exported_layers_compute_the_same():
  model = transformer(9)
  tokens = np.array([[3, 4, 2]])
  init = jax.jit(model.init)
  params = jax.device_get(init(jax.random.key(0), tokens, tokens)["params"])
  found = joeynmt_export._renamed(params, {"encoder": 1, "decoder": 2})
  x = np.asarray(jax.random.normal(jax.random.key(1), (3, 8)))
  bound = model.bind({"params": params})

  def linear(name):
    return x @ found[f"{name}.weight"].T + found[f"{name}.bias"]

  attention = bound.decoder[1].cross_attention
  keys, values = attention.project(x)  # [H, 3, D / H]
  for heads, name in ((keys, "k_layer"), (values, "v_layer")):
    theirs = linear(f"decoder.layers.1.src_trg_att.{name}")
    ours = np.asarray(heads).swapaxes(0, 1).reshape(3, 8)
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
  hidden = np.maximum(linear("encoder.layers.0.feed_forward.pwff_layer.0"), 0)
  theirs = (
    hidden @ found["encoder.layers.0.feed_forward.pwff_layer.3.weight"].T
    + found["encoder.layers.0.feed_forward.pwff_layer.3.bias"]
  )
  ours = bound.encoder[0].feed_forward(x, deterministic=True)
  np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.exhaustive
def test_special_tokens_have_the_indices_of_joeynmt():
  model = transformer(9)
  tokens = np.array([[3, 4, 2]])
  params = jax.jit(model.init)(jax.random.key(0), tokens, tokens)["params"]
  params = jax.device_get(params)
  found = joeynmt_export._renamed(params, {"encoder": 1, "decoder": 2})
  table = params["embedding"]["embedding"]
  np.testing.assert_array_equal(found["src_embed.lut.weight"][0], table[UNK])
  np.testing.assert_array_equal(found["src_embed.lut.weight"][1], table[PAD])
  np.testing.assert_array_equal(found["src_embed.lut.weight"][4:], table[4:])
