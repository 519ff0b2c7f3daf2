"""Heads sharded over more devices than there are key/value heads."""

import jax
import jax.numpy as jnp
import pytest

from attention import biases, masks
from attention.modules import MeshAxes, MultiHeadAttention
from tests.attention.comparison import close
from tests.meshes import make_mesh


@pytest.mark.parametrize(
  ("memory_heads", "devices", "score"),
  [
    (1, 2, "scaled_dot"),
    pytest.param(2, 4, "concat", marks=pytest.mark.exhaustive),
    pytest.param(1, 4, "additive", marks=pytest.mark.exhaustive),
  ],
)
def test_fewer_key_value_heads_than_devices(memory_heads, devices, score):
  tokens = jax.random.normal(jax.random.key(1), (2, 6, 8))
  module = MultiHeadAttention(
    num_heads=4,
    num_key_value_heads=memory_heads,
    score=score,
    dropout_rate=0.3,
  )
  variables = module.init(jax.random.key(0), tokens)

  def gradients(module):
    def loss(variables, tokens):
      outputs = module.apply(
        variables,
        tokens,
        mask=masks.causal(),
        bias=biases.alibi(4),
        deterministic=False,
        rngs={"dropout": jax.random.key(2)},
      )
      return jnp.sum(jnp.sin(outputs))

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, tokens)

  want = gradients(module)
  with jax.set_mesh(make_mesh(tensor=devices)):
    got = gradients(module.clone(mesh_axes=MeshAxes(heads="tensor")))
  close(got, want, rtol=1e-4, atol=2e-5)


def test_key_value_heads_that_cannot_be_sharded_raise():
  module = MultiHeadAttention(
    num_heads=6, num_key_value_heads=3, mesh_axes=MeshAxes(heads="tensor")
  )
  with (
    jax.set_mesh(make_mesh(tensor=2)),
    pytest.raises(ValueError, match="3 key/value heads cannot be sharded"),
  ):
    jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, 6, 12)))
