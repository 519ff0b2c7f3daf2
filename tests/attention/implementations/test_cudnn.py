"""The cuDNN implementation, with the kernel replaced by XLA's attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, request, scores
from attention.implementations.cudnn import kernel as cudnn
from attention.modules import MultiHeadAttention
from tests.attention.oracle import draw


@pytest.fixture
def _stand_in(monkeypatch):
  """Makes arrays appear to be on a GPU and replaces the kernel by XLA."""
  monkeypatch.setattr(request, "_platform", lambda array: "gpu")
  monkeypatch.setattr(cudnn, "call", kernel)


def kernel(*tokens, bias, **options):
  """XLA's attention as the kernel: [B, N, T, D], with reverse mode only."""
  run = jax.custom_vjp(functools.partial(formula, options))
  run.defvjp(
    functools.partial(jax.vjp, functools.partial(formula, options)),
    lambda pull_back, cotangents: pull_back(cotangents),
  )
  return run(*tokens, bias)


def formula(options, query, key, value, bias):
  options = dict(options)
  window = options.pop("sliding_window_length")
  lengths = options.pop("lengths")
  tokens = query, key, value
  if any(array.shape[-1] > 128 for array in tokens):
    raise NotImplementedError("The head dim must be <= 128")
  results = jax.nn.dot_product_attention(
    *(jnp.swapaxes(array, 1, 2) for array in tokens),
    bias=bias,
    key_value_seq_lengths=lengths,
    local_window_size=None if window is None else (window - 1, 0),
    implementation="xla",
    **options,
  )
  if not options["return_residual"]:
    return jnp.swapaxes(results, 1, 2)
  context, lse = results
  return jnp.swapaxes(context, 1, 2), jnp.swapaxes(lse, 1, 2).astype("f4")


def tokens(*shapes, dtype=jnp.bfloat16):
  return [jnp.asarray(array, dtype) for array in draw(0, *shapes)]


def agree(query, key, value, **arguments):
  @jax.jit
  def both(*tokens):
    return [
      attend(*tokens, implementation=each, **arguments)
      for each in ("cudnn", "reference")
    ]

  got, want = both(query, key, value)
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
  with pytest.raises(NotImplementedError, match="refused by JAX"):
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
  kernel = cudnn.call
  monkeypatch.setattr(
    cudnn, "call", lambda *a, **k: calls.append(1) or kernel(*a, **k)
  )
  shapes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)
  attend(*tokens(*shapes))
  count = len(calls)
  assert count
  attend(*tokens(*shapes, dtype=jnp.float32))
  assert len(calls) == count


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
  ("message", "change"),
  [
    ("float32", {"dtype": jnp.float32}),
    ("score", {"score": lambda query, key: query @ key.mT}),
    ("even numbers", {"mask": masks.causal(1)}),
    ("arrays as a bias", {"bias": biases.alibi(3)}),
    ("dtype of the query", {"bias": jnp.zeros((5, 7))}),
    ("dropout", {"dropout_rate": 0.5, "rng": jax.random.key(0)}),
    ("multiples of 8", {"size": 6}),
    ("refused by JAX", {"size": 136}),
  ],
)
def test_unsupported_requests_raise_with_a_reason(message, change):
  change = dict(change)
  size, dtype = change.pop("size", 8), change.pop("dtype", jnp.bfloat16)
  shapes = (2, 3, 5, size), (2, 3, 7, size), (2, 3, 7, size)
  with pytest.raises(NotImplementedError, match=message):
    attend(*tokens(*shapes, dtype=dtype), implementation="cudnn", **change)


SHAPES = (2, 3, 6, 8), (2, 3, 8, 8), (2, 3, 8, 8)
PATTERNS = {
  "padding": masks.padding(jnp.array([3, 8])),
  "an empty example": masks.padding(jnp.array([0, 5])),
  "padding and causal": masks.causal() & masks.padding(jnp.array([0, 5])),
  "window": masks.sliding_window(2, 0),
  "offset": masks.causal(2),
  "both sides": masks.sliding_window(1, 1),
  "window and padding": masks.sliding_window(1, 0) & masks.padding(2),
  "rows without keys": masks.causal(-3),
  "array": jnp.asarray(draw(5, (2, 1, 6, 8))[0] > 0),
  "heads": jnp.asarray(draw(6, (3, 6, 8))[0] > 0),
  "inverted": ~masks.causal(),
}


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("name", PATTERNS)
def test_masks_equal_the_reference(name):
  agree(*tokens(*SHAPES), mask=PATTERNS[name])


@pytest.mark.usefixtures("_stand_in")
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


@pytest.mark.usefixtures("_stand_in")
def test_a_bias_in_the_dtype_of_the_query_may_hide_keys():
  bias = jnp.asarray(draw(7, (3, 6, 8))[0], jnp.bfloat16)
  agree(*tokens(*SHAPES), bias=bias.at[:, :, 2].set(-jnp.inf))


@pytest.mark.usefixtures("_stand_in")
def test_the_lse_and_its_gradient_equal_the_reference():
  query, key, value = tokens(*SHAPES)

  def lse(query, implementation):
    return attend(
      *(query, key, value),
      mask=masks.padding(jnp.array([0, 5])),
      implementation=implementation,
      return_lse=True,
    )[1]

  @jax.jit
  def results(query):
    return [
      (
        lse(query, name),
        jax.grad(lambda query, name=name: lse(query, name)[1].sum())(query),
      )
      for name in ("cudnn", "reference")
    ]

  for got, want in zip(*results(query)):
    np.testing.assert_allclose(
      np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.03
    )


DERIVATIVES = {
  "jvp": lambda loss, tokens: jax.jvp(loss, tokens, tokens)[1],
  "hessian-vector product": lambda loss, tokens: jax.jvp(
    jax.grad(loss, (0, 1, 2)), tokens, tokens
  )[1],
  "reverse over reverse": lambda loss, tokens: jax.grad(
    lambda *tokens: sum(
      jnp.vdot(one, other).astype("f4")
      for one, other in zip(jax.grad(loss, (0, 1, 2))(*tokens), tokens)
    ),
    (0, 1, 2),
  )(*tokens),
  "jacfwd": lambda loss, tokens: jax.jacfwd(loss)(*tokens),
  "vmap of a gradient": lambda loss, tokens: jax.vmap(jax.grad(loss, (0, 2)))(
    *(each[:, None] for each in tokens)
  ),
}
BIASED = {
  "none": {},
  "lengths": {"mask": PATTERNS["padding and causal"]},
  "window": {"mask": PATTERNS["window"]},
  "heads": {"mask": PATTERNS["heads"]},
  "bias": {"bias": jnp.asarray(draw(7, (3, 6, 8))[0], jnp.bfloat16)},
}


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("arguments", BIASED)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_all_derivatives_equal_the_reference(derivative, arguments):
  if "vmap" in derivative and arguments == "lengths":
    pytest.skip("one example has no batch of lengths")
  weights = jnp.cos(jnp.arange(8.0))

  def loss(implementation, *tokens):
    context = attend(
      *tokens, **BIASED[arguments], implementation=implementation
    )
    return jnp.sum(jnp.sin(context.astype("f4")) @ weights)

  def derivatives(implementation):
    function = functools.partial(loss, implementation)
    return DERIVATIVES[derivative](function, tuple(tokens(*SHAPES)))

  got, want = (
    [np.asarray(each, "f4") for each in jax.tree.leaves(jax.jit(run)())]
    for run in (
      functools.partial(derivatives, name) for name in ("cudnn", "reference")
    )
  )
  for mine, right in zip(got, want):
    error = np.linalg.norm(mine - right) / np.linalg.norm(right)
    assert error < 0.05, error


@pytest.mark.usefixtures("_stand_in")
def test_the_gradient_of_a_bias_equals_the_reference():
  bias = jnp.asarray(draw(7, (3, 6, 8))[0], jnp.bfloat16)

  def gradient(implementation):
    def loss(bias):
      context = attend(
        *tokens(*SHAPES), bias=bias, implementation=implementation
      )
      return jnp.sum(jnp.sin(context.astype("f4")))

    return np.asarray(jax.jit(jax.grad(loss))(bias), "f4")

  got, want = gradient("cudnn"), gradient("reference")
  assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


@pytest.mark.usefixtures("_stand_in")
def test_forward_mode_through_multi_head_attention():
  module = MultiHeadAttention(4, dtype=jnp.bfloat16)
  mask = masks.causal() & masks.padding(jnp.array([3, 6]))

  def derivative(inputs):
    def output(inputs):
      return module.init_with_output(jax.random.key(0), inputs, mask=mask)[0]

    return jax.jvp(output, (inputs,), (inputs,))

  inputs = jax.ShapeDtypeStruct((2, 6, 32), jnp.bfloat16)
  result, tangent = jax.eval_shape(derivative, inputs)
  assert tangent.shape == result.shape == (2, 6, 32)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("memory_heads", [4, 2])
def test_multi_head_attention_reaches_the_kernel(memory_heads, monkeypatch):
  calls = []
  monkeypatch.setattr(
    cudnn, "call", lambda *a, **k: calls.append(1) or kernel(*a, **k)
  )
  module = MultiHeadAttention(
    4, num_key_value_heads=memory_heads, dtype=jnp.bfloat16
  )
  inputs = jnp.ones((2, 6, 32), jnp.bfloat16)
  mask = masks.causal() & masks.padding(jnp.array([3, 6]))
  initialize = functools.partial(module.init_with_output, mask=mask)
  jax.eval_shape(initialize, jax.random.key(0), inputs)
  assert calls


def test_cudnn_without_a_gpu_raises():
  with pytest.raises(NotImplementedError, match="needs a GPU"):
    attend(*tokens((5, 8), (7, 8), (7, 8)), implementation="cudnn")
