"""Agreement with PyTorch, where it is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, multi_head_attention
from tests.attention.oracle import draw
from tests.matrix import sampled

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def as_torch(array):
  return torch.tensor(
    np.asarray(array), dtype=torch.float64, requires_grad=True
  )


@sampled(
  "choice", ["plain", "causal", "mask", "bias"], default=["causal", "bias"]
)
def test_scaled_dot_product_attention_with_gradients(choice):
  query, key, value = draw(0, (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))
  ours, theirs = {
    "plain": ({}, {}),
    "causal": ({"mask": masks.causal()}, {"is_causal": True}),
    "mask": (
      {"mask": masks.padding(jnp.array([2, 6]))},
      {"attn_mask": torch.arange(7) < torch.tensor([2, 6]).reshape(2, 1, 1, 1)},
    ),
    "bias": (
      {"bias": biases.alibi(3)},
      {"attn_mask": as_torch(biases.alibi(3).materialize(5, 7)).detach()},
    ),
  }[choice]
  tensors = [as_torch(array) for array in (query, key, value)]
  output = torch.nn.functional.scaled_dot_product_attention(*tensors, **theirs)
  (output**2).sum().backward()
  with jax.enable_x64(True):

    def loss(query, key, value):
      context = attend(query, key, value, **ours)
      return jnp.sum(context**2), context

    gradients, context = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(
      *(jnp.asarray(array) for array in (query, key, value))
    )
  np.testing.assert_allclose(
    context, output.detach().numpy(), rtol=1e-6, atol=1e-8
  )
  for gradient, tensor in zip(gradients, tensors, strict=True):
    np.testing.assert_allclose(
      gradient, tensor.grad.numpy(), rtol=1e-5, atol=1e-7
    )


def test_multi_head_attention_with_copied_weights():
  query, key = draw(1, (2, 5, 8), (2, 7, 8))
  layer = torch.nn.MultiheadAttention(8, 4, batch_first=True).double()
  with torch.no_grad():
    layer.in_proj_bias.normal_()
    layer.out_proj.bias.normal_()
  hidden = torch.tensor([[False] * 3 + [True] * 4, [False] * 7])
  expected, weights = layer(
    torch.tensor(query),
    torch.tensor(key),
    torch.tensor(key),
    key_padding_mask=hidden,
    average_attn_weights=False,
  )
  assert weights.shape == (2, 4, 5, 7)
  kernels = layer.in_proj_weight.detach().numpy().reshape(3, 4, 2, 8)
  added = layer.in_proj_bias.detach().numpy().reshape(3, 4, 2)
  with jax.enable_x64(True):
    got = jax.jit(multi_head_attention)(
      query,
      key,
      key,
      *np.moveaxis(kernels, -1, 1),
      layer.out_proj.weight.detach().numpy().T.reshape(4, 2, 8),
      query_bias=added[0],
      key_bias=added[1],
      value_bias=added[2],
      output_bias=layer.out_proj.bias.detach().numpy(),
      mask=masks.padding(jnp.array([3, 7])),
    )
  np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-8)
