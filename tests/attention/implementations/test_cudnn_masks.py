"""Masks of the cuDNN implementation: arguments of the kernel, or arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, masks
from attention.implementations.cudnn import kernel as cudnn
from attention.implementations.cudnn import obstacles
from attention.implementations.reference import size
from tests.attention.implementations.cudnn_stand_in import (
  PATTERNS,
  SHAPES,
  agree,
  tokens,
)

pytestmark = pytest.mark.usefixtures("_stand_in")


def test_masks_equal_the_reference():
  @jax.jit
  def contexts(tokens):
    return {
      name: [
        attend(*tokens, mask=mask, implementation=each)
        for each in ("cudnn", "reference")
      ]
      for name, mask in PATTERNS.items()
    }

  for name, (got, want) in contexts(tokens(*SHAPES)).items():
    assert got.dtype == want.dtype
    got, want = (np.asarray(each, "f4") for each in (got, want))
    np.testing.assert_allclose(got, want, atol=0.03, err_msg=name)


@pytest.mark.parametrize(
  ("name", "length"),
  [("offset", 8), ("both sides", 8), ("rows without keys", 4), ("window", 6)],
)
def test_bands_become_causal_calls(name, length, monkeypatch):
  """No array of pairs, for all numbers of queries and keys."""
  calls = []
  kernel = cudnn.call

  def recorded(query, *rest, **options):
    calls.append((query.shape[2], options["is_causal"], options["mask"]))
    return kernel(query, *rest, **options)

  monkeypatch.setattr(cudnn, "call", recorded)
  call = functools.partial(attend, mask=PATTERNS[name], implementation="cudnn")
  jax.eval_shape(call, *tokens(*SHAPES))
  assert calls[-1] == (length, True, None)


def test_windows_of_more_queries_than_keys_are_arrays(monkeypatch):
  # cuDNN has no such windows.
  shapes = (2, 8, 8), (2, 6, 8), (2, 6, 8)
  for mask in (masks.sliding_window(3, 0), masks.sliding_window(1, 1)):
    agree(*tokens(*shapes), mask=mask)
  monkeypatch.setattr(obstacles, "_LARGEST_ARRAY", 0)
  with pytest.raises(NotImplementedError, match="an array of 0 MiB"):
    attend(*tokens(*shapes), mask=mask, implementation="cudnn")


@pytest.mark.parametrize("mask", [masks.causal(-2), masks.sliding_window(2, 1)])
def test_derivatives_of_shifted_queries_equal_the_reference(mask, monkeypatch):
  monkeypatch.setattr(size, "_BYTES", 0)  # else those of the dense formula

  def loss(query, key, value, implementation):
    context, lse = attend(
      *(query, key, value),
      mask=mask,
      implementation=implementation,
      return_lse=True,
    )
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(jnp.sin(context.astype("f4"))) + lse.sum()

  @jax.jit
  def both(*tokens):
    function = jax.value_and_grad(loss, (0, 1, 2))
    return [
      jax.tree.leaves(function(*tokens, name))
      for name in ("cudnn", "reference")
    ]

  for got, want in zip(*both(*tokens(*SHAPES))):
    got, want = (np.asarray(each, "f4") for each in (got, want))
    np.testing.assert_allclose(got, want, 0.02, 0.03)


@pytest.mark.exhaustive
def test_gradients_of_rows_without_keys_are_zero():
  arrays = tokens(*SHAPES)
  mask = masks.padding(jnp.array([0, 5])) & masks.causal()

  def gradients(implementation):
    def total(*tokens):
      context = attend(*tokens, mask=mask, implementation=implementation)
      return context.astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2))(*arrays)

  for got, want in zip(gradients("cudnn"), gradients("reference")):
    assert (got[0] == 0).all()
    np.testing.assert_allclose(
      np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.05
    )
