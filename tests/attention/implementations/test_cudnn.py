"""The cuDNN implementation, with the kernel replaced by XLA's attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, request, scores
from attention.implementations import cudnn
from tests.attention.oracle import draw


@pytest.fixture
def _stand_in(monkeypatch):
  """Makes arrays appear to be on a GPU and replaces the kernel by XLA."""
  monkeypatch.setattr(request, "_platform", lambda array: "gpu")
  kernel = functools.partial(
    jax.nn.dot_product_attention, implementation="xla", scale=1.0
  )
  monkeypatch.setattr(cudnn, "_kernel", kernel)


def tokens(*shapes, dtype=jnp.bfloat16):
  return [jnp.asarray(array, dtype) for array in draw(0, *shapes)]


def agree(query, key, value, **arguments):
  got = attend(query, key, value, implementation="cudnn", **arguments)
  want = attend(query, key, value, implementation="reference", **arguments)
  assert got.shape == want.shape
  assert got.dtype == want.dtype
  np.testing.assert_allclose(
    np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.03
  )


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("mask", [None, masks.causal()])
@pytest.mark.parametrize(
  "score",
  [scores.scaled_dot(), scores.dot(), scores.cosine(5.0)],
  ids=["scaled_dot", "dot", "cosine"],
)
def test_cudnn_equals_the_reference_for_dot_products(score, mask):
  shapes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)
  agree(*tokens(*shapes), score=score, mask=mask)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("heads", [(), (3,)], ids=["one", "each"])
def test_general_score_may_change_the_number_of_features(heads):
  shapes = (2, 3, 5, 16), (2, 3, 7, 8), (2, 3, 7, 8), (*heads, 16, 8)
  *arrays, weight = tokens(*shapes)
  agree(*arrays, score=scores.general(weight / 8))


@pytest.mark.usefixtures("_stand_in")
def test_limits_apply_to_mapped_tokens():
  arrays = tokens((5, 8), (7, 16), (7, 16))
  wide = jnp.ones((8, 16), jnp.float32)
  with pytest.raises(NotImplementedError, match="bfloat16, float32"):
    attend(*arrays, score=scores.general(wide), implementation="cudnn")
  *arrays, heads = tokens((5, 8), (7, 16), (7, 16), (3, 8, 16))
  agree(
    *arrays, score=scores.general(heads / 8)
  )  # three query heads, one key head
  arrays = tokens((5, 16), (7, 8), (7, 16))
  narrow = jnp.ones((16, 8), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match="got 8 and 16"):
    attend(*arrays, score=scores.general(narrow), implementation="cudnn")


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
  ("leading", "memory"),
  [((), ()), ((3,), (3,)), ((2, 2, 3), (2, 2, 1)), ((2, 1, 2), (2, 1, 2))],
)
def test_supported_leading_axes_and_groups(leading, memory):
  shapes = (*leading, 5, 8), (*memory, 7, 8), (*memory, 7, 8)
  agree(*tokens(*shapes))


@pytest.mark.usefixtures("_stand_in")
def test_nan_behind_a_causal_mask_changes_nothing():
  query, key, value = tokens((2, 6, 8), (2, 6, 8), (2, 6, 8))
  clean = attend(query, key, value, mask=masks.causal(), implementation="cudnn")
  dirty = attend(
    query,
    key.at[:, 4].set(jnp.nan),
    value.at[:, 4].set(jnp.inf),
    mask=masks.causal(),
    implementation="cudnn",
  )
  np.testing.assert_array_equal(dirty[:, :4], clean[:, :4])
  assert jnp.isnan(dirty[:, 4:]).all()


@pytest.mark.usefixtures("_stand_in")
def test_dispatch_chooses_cudnn_for_supported_requests(monkeypatch):
  calls = []
  kernel = cudnn._kernel
  monkeypatch.setattr(
    cudnn, "_kernel", lambda *a, **k: calls.append(1) or kernel(*a, **k)
  )
  shapes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)
  attend(*tokens(*shapes))
  assert len(calls) == 1
  attend(*tokens(*shapes), return_lse=True)
  attend(*tokens(*shapes, dtype=jnp.float32))
  assert len(calls) == 1


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
  ("message", "change"),
  [
    ("float32", {"dtype": jnp.float32}),
    ("score", {"score": lambda query, key: query @ key.mT}),
    ("mask", {"mask": masks.prefix(3)}),
    ("mask", {"mask": masks.causal(1)}),
    ("bias", {"bias": biases.alibi(3)}),
    ("dropout", {"dropout_rate": 0.5, "rng": jax.random.key(0)}),
    ("log-sum-exp", {"return_lse": True}),
    ("multiple of 8", {"size": 6}),
  ],
)
def test_unsupported_requests_raise_with_a_reason(message, change):
  change = dict(change)
  size, dtype = change.pop("size", 8), change.pop("dtype", jnp.bfloat16)
  shapes = (2, 3, 5, size), (2, 3, 7, size), (2, 3, 7, size)
  with pytest.raises(NotImplementedError, match=message):
    attend(*tokens(*shapes, dtype=dtype), implementation="cudnn", **change)


def test_cudnn_without_a_gpu_raises():
  with pytest.raises(NotImplementedError, match="needs a GPU"):
    attend(*tokens((5, 8), (7, 8), (7, 8)), implementation="cudnn")
