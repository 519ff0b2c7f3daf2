"""Attention layers of Hugging Face models, reproduced with their weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import biases, dot_score, masks, multi_head_attention, scores
from attention import positions as encodings
from tests.matrix import sampled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS, SIZE, LENGTH = 4, 8, 11
FEATURES = HEADS * SIZE


def array(tensor):
  return jnp.asarray(tensor.detach().numpy())


def projection(linear, heads):
  """A weight [inputs, outputs] as [inputs, heads, size], and the bias."""
  weight = array(linear.weight).T
  bias = None if linear.bias is None else array(linear.bias)
  return (
    jnp.reshape(weight, (len(weight), heads, -1)),
    None if bias is None else jnp.reshape(bias, (heads, -1)),
  )


def fused(linear):
  """The projections of query, key and value of each head."""
  weight = array(linear.weight).T
  weight = jnp.reshape(weight, (len(weight), HEADS, 3, SIZE))
  bias = jnp.reshape(array(linear.bias), (HEADS, 3, SIZE))
  return [(weight[:, :, part], bias[:, part]) for part in range(3)]


def output(linear):
  weight = array(linear.weight).T
  return jnp.reshape(weight, (HEADS, SIZE, -1)), (
    None if linear.bias is None else array(linear.bias)
  )


def drawn_tokens():
  torch.manual_seed(0)
  return torch.randn(2, LENGTH, FEATURES)


def causal():
  hidden = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min)
  return torch.triu(hidden, diagonal=1)[None, None]


def close(tokens, projections, expected, **options):
  weights, offsets = zip(*projections)
  names = ("query_bias", "key_bias", "value_bias", "output_bias")
  got = jax.jit(
    lambda tokens: multi_head_attention(
      tokens, tokens, tokens, *weights, **dict(zip(names, offsets)), **options
    )
  )(array(tokens))
  np.testing.assert_allclose(got, array(expected), rtol=1e-4, atol=1e-5)


SCALINGS = {
  "default": None,
  "linear": encodings.LinearScaling(4.0),
  "yarn": encodings.YaRNScaling(4.0, original_length=64),
  "llama3": encodings.Llama3Scaling(4.0, original_length=64),
}


@sampled("name", SCALINGS, default=["yarn", "llama3"])
def test_llama(name):
  from transformers.models.llama import modeling_llama

  parameters = {"rope_type": name, "rope_theta": 500.0}
  if name != "default":
    parameters["factor"] = 4.0
  if name in ("yarn", "llama3"):
    parameters["original_max_position_embeddings"] = 64
  if name == "llama3":
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
  config = transformers.LlamaConfig(
    hidden_size=FEATURES,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rope_parameters=parameters,
    attn_implementation="eager",
  )
  tokens = drawn_tokens()
  layer = modeling_llama.LlamaAttention(config, layer_idx=0)
  places = torch.tensor([range(LENGTH), range(9, 9 + LENGTH)])
  rotation = modeling_llama.LlamaRotaryEmbedding(config)(tokens, places)
  expected, _ = layer(
    tokens, position_embeddings=rotation, attention_mask=causal()
  )
  close(
    tokens,
    [
      projection(layer.q_proj, HEADS),
      projection(layer.k_proj, 2),
      projection(layer.v_proj, 2),
      output(layer.o_proj),
    ],
    expected,
    mask=masks.causal(),
    positions=array(places),
    rotary=encodings.RotaryOptions(
      500.0, pairs="half_split", scaling=SCALINGS[name]
    ),
  )


def test_gpt_neox_rotates_a_part_of_the_features():
  from transformers.models.gpt_neox import modeling_gpt_neox

  config = transformers.GPTNeoXConfig(
    hidden_size=FEATURES,
    num_attention_heads=HEADS,
    rope_parameters={
      "rope_type": "default",
      "rope_theta": 500.0,
      "partial_rotary_factor": 0.5,
    },
    attn_implementation="eager",
  )
  tokens = drawn_tokens()
  layer = modeling_gpt_neox.GPTNeoXAttention(config, layer_idx=0).eval()
  places = torch.arange(LENGTH)[None]
  rotation = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(tokens, places)
  expected, _ = layer(
    tokens, attention_mask=causal(), position_embeddings=rotation
  )
  close(
    tokens,
    [*fused(layer.query_key_value), output(layer.dense)],
    expected,
    mask=masks.causal(),
    rotary=encodings.RotaryOptions(
      500.0, rotary_dim=SIZE // 2, pairs="half_split"
    ),
  )


def test_deberta():
  from transformers.models.deberta_v2 import modeling_deberta_v2

  most = 4  # of the distances
  config = transformers.DebertaV2Config(
    hidden_size=FEATURES,
    num_attention_heads=HEADS,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    max_relative_positions=most,
  )
  tokens, table = drawn_tokens(), torch.randn(2 * most, FEATURES)
  layer = modeling_deberta_v2.DisentangledSelfAttention(config).eval()
  visible = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
  expected = layer(tokens, visible, rel_embeddings=table)[0]

  def of_distances(linear):
    rows = array(linear(table)).reshape(2 * most, HEADS, SIZE)
    return jnp.swapaxes(rows, 0, 1)

  close(
    tokens,
    [
      *(
        projection(each, HEADS)
        for each in (layer.query_proj, layer.key_proj, layer.value_proj)
      ),
      (jnp.eye(FEATURES).reshape(HEADS, SIZE, FEATURES), None),
    ],
    expected,
    score=scores.disentangled(
      of_distances(layer.pos_key_proj),
      of_distances(layer.pos_query_proj),
      as_released=True,
    ),
  )


@pytest.mark.parametrize("is_decoder", [False, True])
def test_t5(is_decoder):
  from transformers.models.t5 import modeling_t5

  config = transformers.T5Config(
    d_model=FEATURES,
    d_kv=SIZE,
    num_heads=HEADS,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    is_decoder=is_decoder,
    attn_implementation="eager",
  )
  tokens = drawn_tokens()
  layer = modeling_t5.T5Attention(
    config, has_relative_attention_bias=True, layer_idx=0
  ).eval()
  table = layer.relative_attention_bias.weight
  expected = layer(tokens, mask=causal() if is_decoder else None)[0]
  close(
    tokens,
    [
      *(projection(each, HEADS) for each in (layer.q, layer.k, layer.v)),
      output(layer.o),
    ],
    expected,
    score=dot_score,
    mask=masks.causal() if is_decoder else None,
    bias=biases.relative_position(
      array(table), bidirectional=not is_decoder, max_distance=10
    ),
  )


def test_bert_with_padding():
  from transformers.models.bert import modeling_bert

  config = transformers.BertConfig(
    hidden_size=FEATURES, num_attention_heads=HEADS, attn_implementation="eager"
  )
  tokens = drawn_tokens()
  layer = modeling_bert.BertSelfAttention(config).eval()
  is_hidden = torch.arange(LENGTH) >= torch.tensor([[7], [LENGTH]])
  mask = is_hidden[:, None, None] * torch.finfo(torch.float32).min
  expected = layer(tokens, attention_mask=mask)[0]
  close(
    tokens,
    [
      *(
        projection(each, HEADS)
        for each in (layer.query, layer.key, layer.value)
      ),
      (jnp.reshape(jnp.eye(FEATURES), (HEADS, SIZE, FEATURES)), None),
    ],
    expected,
    mask=masks.padding(jnp.array([7, LENGTH])),
  )


def test_bloom():
  from transformers.models.bloom import modeling_bloom

  config = transformers.BloomConfig(hidden_size=FEATURES, n_head=HEADS)
  tokens = drawn_tokens()
  layer = modeling_bloom.BloomAttention(config, layer_idx=0).eval()
  alibi = modeling_bloom.build_alibi_tensor(
    torch.ones(2, LENGTH), HEADS, torch.float32
  )
  expected = layer(
    tokens, torch.zeros_like(tokens), alibi=alibi, attention_mask=causal()
  )[0]
  close(
    tokens,
    [*fused(layer.query_key_value), output(layer.dense)],
    expected,
    mask=masks.causal(),
    bias=biases.alibi(HEADS),
  )
