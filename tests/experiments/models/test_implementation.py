"""The implementation of attention that a config names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.implementations import BY_NAME, Pallas
from experiments.config import MeshConfig
from experiments.data.batch import BOS, EOS, PAD
from experiments.distributed.mesh import make_mesh, map_shards
from experiments.distributed.sharding import mesh_axes
from experiments.errors import UserError
from tests.attention.comparison import close
from tests.experiments.toys import make_rnn, make_transformer, random_parameters
from tests.matrix import sampled

VOCABULARY = 9
SOURCE = np.array([[3, 4, 5, EOS], [6, EOS, PAD, PAD]])
TARGET = np.array([[5, 4, 3, EOS], [7, EOS, PAD, PAD]])
MODELS = {
  "transformer": lambda **options: make_transformer(
    VOCABULARY, VOCABULARY, encoder_layers=1, decoder_layers=1, **options
  ),
  "rnn": lambda **options: make_rnn(
    VOCABULARY, VOCABULARY, attention="general", **options
  ),
}


@functools.cache
def variables_of(name):
  """Parameters of a model with any implementation."""
  return {"params": random_parameters(MODELS[name](), SOURCE, TARGET)}


class Counted:
  """An implementation that stores the shapes of the scores that it computes."""

  def __init__(self, implementation):
    self.implementation, self.shapes = implementation, []

  def obstacle(self, request):
    return self.implementation.obstacle(request)

  def __call__(self, request):
    self.shapes.append(request.scores_shape[-2:])
    return self.implementation(request)


@pytest.fixture
def counted(monkeypatch):
  counted = Counted(Pallas(interpret=True))
  monkeypatch.setitem(BY_NAME, "pallas", counted)
  return counted


@pytest.mark.parametrize(("name", "calls"), [("transformer", 3), ("rnn", 1)])
def test_a_named_implementation_computes_whole_sequences_only(
  name, calls, counted
):
  plain = MODELS[name]()
  named = MODELS[name](attention_implementation="pallas")
  jax.eval_shape(named.init, jax.random.key(0), SOURCE, TARGET)
  assert not counted.shapes  # Initial values need no kernel.
  variables = variables_of(name)
  logits = jax.jit(named.apply)(variables, SOURCE, TARGET)
  assert counted.shapes == [(4, 4)] * calls
  np.testing.assert_allclose(
    logits, jax.jit(plain.apply)(variables, SOURCE, TARGET), atol=1e-5
  )
  assert counted.shapes == [(4, 4)] * calls
  counted.shapes.clear()

  @jax.jit
  def step(source):
    memory, carry = named.apply(variables, source, 4, method="start")
    token = jnp.full(len(source), BOS)
    return named.apply(variables, memory, carry, token, method="step")[1]

  np.testing.assert_allclose(step(SOURCE), logits[:, 0], atol=1e-5)
  assert counted.shapes == [(4, 4)] * (name == "transformer")  # the encoder


def test_steps_of_a_beam_have_the_library_s_choice(counted):
  named = MODELS["transformer"](attention_implementation="pallas")

  def step():
    variables = named.init(jax.random.key(0), SOURCE, TARGET)
    memory, carry = named.apply(variables, SOURCE, 4, 3, method="beam_start")
    counted.shapes.clear()
    token = jnp.full((len(SOURCE), 3), BOS)
    return named.apply(
      variables, memory, carry, token, None, method="beam_step"
    )

  jax.eval_shape(step)
  assert not counted.shapes


def test_an_implementation_that_cannot_serve_a_model_is_an_error():
  model = MODELS["transformer"](attention_implementation="pallas")
  variables = variables_of("transformer")
  message = r"config\.model\.attention_implementation: 'pallas' .* needs a TPU"
  with pytest.raises(UserError, match=message):
    jax.eval_shape(model.apply, variables, SOURCE, TARGET)


@sampled(
  "axes",
  [{"data": 2, "tensor": 2}, {"fsdp": 2}],
  default=[{"data": 2, "tensor": 2}],
)
def test_a_transformer_divides_its_attention_over_a_mesh(axes, counted):
  plain = MODELS["transformer"]()
  named = MODELS["transformer"](attention_implementation="pallas")
  variables = variables_of("transformer")
  mesh = make_mesh(MeshConfig(**{"data": 1} | axes))
  divided = named.clone(mesh_axes=mesh_axes(mesh, with_rows=True))

  def loss(variables, model):
    logits = model.apply(variables, SOURCE, TARGET)
    return jnp.sum(jnp.sin(logits) * (TARGET != PAD)[..., None])

  want = jax.jit(jax.grad(loss), static_argnums=1)(variables, plain)
  with jax.set_mesh(mesh):
    got = jax.jit(jax.grad(loss), static_argnums=1)(variables, divided)
  assert counted.shapes
  close(got, want, rtol=1e-4, atol=1e-5)


def test_kernels_are_not_divided_over_a_mesh_by_xla(counted):
  model = MODELS["transformer"](attention_implementation="pallas")
  variables = variables_of("transformer")
  mesh = make_mesh(MeshConfig(data=2))
  with (
    jax.set_mesh(mesh),
    pytest.raises(UserError, match=r"needs one device.* config\.mesh"),
  ):
    jax.jit(model.apply)(variables, SOURCE, TARGET)
  of_shards = map_shards(lambda *args: model.apply(args[0], *args[1]), mesh)
  logits = jax.eval_shape(of_shards, variables, (SOURCE, TARGET))
  assert logits.shape == (2, 4, VOCABULARY)
