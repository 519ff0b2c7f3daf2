import jax
import jax.numpy as jnp
import numpy as np

from experiments.config import Seq2SeqConfig, TransformerConfig
from experiments.decoding.rounded_params import rounded
from experiments.decoding.steps import make_steps
from experiments.models.rnn.seq2seq import Seq2Seq
from experiments.models.transformer.model import Transformer
from tests.experiments.toys import random_parameters
from tests.matrix import sampled_product


@jax.jit
def half_product(x, weight):
  return x @ weight.T.astype(jnp.bfloat16)


def layers(params, x):
  x = half_product(x.astype(jnp.bfloat16), params["product"])

  def layer(x, weight):
    return x @ weight.astype(jnp.bfloat16), None

  x = jax.lax.scan(layer, x, params["scan"])[0]

  def step(carry, _):
    return 0.5 * carry.astype(jnp.bfloat16).astype(jnp.float32), None

  x += jax.lax.scan(step, params["carry"], length=2)[0][None]
  x = x * params["scale"][None] + params["both"].astype(jnp.bfloat16)[None]
  return x + params["both"][None], params["result"], params["half"]


def test_parameters_are_rounded_where_a_function_rounds_all_of_their_uses():
  names = {"product": (4, 4), "scan": (3, 4, 4), "scale": (4,), "both": (4,)}
  names |= {"carry": (4,)}
  rng = np.random.default_rng(0)
  params = {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, shape in (names | {"result": (2,), "half": (2,)}).items()
  }
  params["half"] = params["half"].astype(jnp.bfloat16)
  x = jnp.ones((2, 4))
  found = rounded(layers, params, x)
  dtypes = {name: str(each.dtype) for name, each in found.items()}
  half = {"product", "scan", "half"}
  assert {n for n, dtype in dtypes.items() if dtype == "bfloat16"} == half
  for got, want in zip(layers(found, x), layers(params, x)):
    np.testing.assert_array_equal(got, want)


@sampled_product(
  ("beam_size", "name", "dtype"),
  [(1, 3), ("transformer", "seq2seq"), ("bfloat16", "float32")],
  default=[(1, "transformer", "bfloat16"), (3, "seq2seq", "bfloat16")],
)
def test_steps_with_rounded_parameters_return_the_same(name, dtype, beam_size):
  if name == "transformer":
    config = TransformerConfig(
      model_size=16, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    model = Transformer(config, 9, 9, False, 8, dtype)
  else:
    config = Seq2SeqConfig(embedding_size=8, hidden_size=8, attention_size=8)
    model = Seq2Seq(config, 9, 9, 8, dtype)
  source = np.array([[3, 4, 2], [5, 2, 0]])
  params = random_parameters(model, source, source)
  steps = make_steps(model, params, beam_size)
  memory, carry = jax.jit(steps.start, static_argnums=1)(source, 8)
  prepared = steps.prepared(memory, carry, 2)
  token = np.full((2, beam_size), 4)
  got, want = (
    jax.jit(each.step)(memory, carry, token, None)[1]
    for each in (prepared, steps)
  )
  np.testing.assert_array_equal(got, want)
  leaves = jax.tree.leaves(prepared.variables)
  are_half = [leaf.dtype == jnp.bfloat16 for leaf in leaves]
  assert any(are_half) == (dtype == "bfloat16")
  assert not all(are_half)  # norms are float32, or the encoder's are not used
