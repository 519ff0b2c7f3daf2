"""cuDNN's kernel, replaced by XLA's attention on CPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend, masks, request
from attention.implementations.cudnn import kernel as cudnn
from tests.attention.oracle import draw

SHAPES = (2, 3, 6, 8), (2, 3, 8, 8), (2, 3, 8, 8)
PATTERNS = {
  "padding": masks.padding(jnp.array([3, 8])),
  "an empty example": masks.padding(jnp.array([0, 5])),
  "padding and causal": masks.causal() & masks.padding(jnp.array([0, 5])),
  "window": masks.sliding_window(2, 0),
  "offset": masks.causal(2),
  "offset and padding": masks.causal(3) & masks.padding(jnp.array([0, 5])),
  "more rows than queries": masks.causal(7),
  "no row with a key": masks.causal(-6),
  "after the query": masks.sliding_window(-1, 2),
  "both sides": masks.sliding_window(1, 1),
  "window and padding": masks.sliding_window(1, 0) & masks.padding(2),
  "rows without keys": masks.causal(-3),
  "array": jnp.asarray(draw(5, (2, 1, 6, 8))[0] > 0),
  "heads": jnp.asarray(draw(6, (3, 6, 8))[0] > 0),
  "inverted": ~masks.causal(),
}


def install(monkeypatch):
  """Makes arrays appear to be on a GPU and replaces the kernel by XLA."""
  monkeypatch.setattr(request, "_platform", lambda array: "gpu")
  monkeypatch.setattr(cudnn, "call", kernel)


def kernel(*tokens, bias, **options):
  """XLA's attention as the kernel: [B, N, T, D], with reverse mode only."""
  compute = functools.partial(formula, options)
  run = jax.custom_vjp(lambda *arrays: opaque(compute(*arrays)))

  def forward(*arrays):
    results, pull_back = jax.vjp(compute, *arrays)
    return opaque(results), pull_back

  def backward(pull_back, cotangents):
    return opaque(pull_back(cotangents))

  run.defvjp(forward, backward)
  return run(*tokens, bias)


def opaque(arrays):
  """The same numbers, without derivatives, as a kernel's."""

  def copied(array):
    bits = jnp.uint16 if array.dtype.itemsize == 2 else jnp.uint32
    as_bits = jax.lax.bitcast_convert_type(array, bits)
    return jax.lax.bitcast_convert_type(as_bits, array.dtype)

  return jax.tree.map(copied, arrays)


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
  return draw(0, *shapes, dtype=dtype)


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
