"""Interpreted kernels for Hopper GPUs, and how tests compare them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, scores
from attention.implementations import Pallas
from attention.scores.base import Wrapper
from tests.attention.oracle import draw

# The interpreter is not public in JAX 0.10.
params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
interpreter = pytest.importorskip(
  "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
)
INTERPRETED = Pallas(target="hopper", interpret=params.InterpretGPUParams())


def _call_with_numpy_arrays(*arrays, callback, **options):
  """What JAX does for a callback, without making JAX arrays of its arguments.

  The interpreter reads each number of an index from an array. With JAX arrays a
  test of many blocks takes 1.7 times as long.
  """
  del options
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    return jax.tree.map(np.asarray, callback(*arrays))


# The function is private; without it tests only take longer.
callbacks = pytest.importorskip("jax._src.callback")
if hasattr(callbacks, "io_callback_impl"):
  callbacks.io_callback_impl = _call_with_numpy_arrays


def arrays(*shapes, seed=0, dtype=jnp.bfloat16):
  return draw(seed, *shapes, dtype=dtype)


def additive(channels=8):
  shapes = (64, channels), (64, channels), (channels,)
  weights = arrays(*shapes, seed=1, dtype=jnp.float32)
  return scores.additive(*(0.3 * each for each in weights))


def concat(dtype=jnp.float32):
  weights = arrays((128, 64), (64,), seed=1)
  return scores.concat(*((0.3 * each).astype(dtype) for each in weights))


def general(dtype=jnp.float32, heads=()):
  (weight,) = arrays((*heads, 64, 64), seed=2)
  return scores.general(0.1 * weight.astype(dtype))


def manhattan(query, key):
  return -0.1 * jnp.abs(query[..., :, None, :] - key[..., None, :, :]).sum(-1)


WEIGHT = np.linspace(0.0, 0.01, 64, dtype="f4")
OUTER = jnp.float32(3.0)


def weighted_distance(query, key):
  difference = jnp.sin(query)[..., :, None, :] - key[..., None, :, :]
  weight = jnp.broadcast_to(WEIGHT, difference.shape)
  total = jnp.sum(weight * difference**2, axis=-1)
  return OUTER * jnp.exp(-total)


def mapped_product(query, key):
  return 0.1 * (jnp.sin(query) @ key.mT)


def positive_differences(query, key):
  difference = query[..., :, None, :] - key[..., None, :, :]
  return 0.1 * jnp.where(difference > 0.0, difference, 0.0).sum(-1)


def forgetting(score=None):
  (gates,) = arrays((100,), dtype=jnp.float32)
  return scores.forgetting(score or scores.scaled_dot(), -0.1 * jnp.abs(gates))


def predicting(score=None, units=128, **options):
  """Local-p."""
  matrix, vector = arrays((64, units), (units,), seed=6, dtype=jnp.float32)
  score = score or scores.scaled_dot()
  return scores.local(score, 40.0, 0.2 * matrix, vector, **options)


def gains():
  return (1.0 + 0.3 * each for each in arrays((64,), (64,), seed=8))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MappedKeys(Wrapper):
  """A score of changed keys."""

  def map_key(self, key):
    return jnp.sin(self.score.map_key(key))


def transformer_xl():
  matrix, *vectors = arrays((64, 64), (64,), (64,), seed=7, dtype=jnp.float32)
  return scores.transformer_xl(0.1 * matrix, *(0.1 * x for x in vectors))


def nearer(scores, query_positions, key_positions):
  return scores - 0.1 * jnp.abs(query_positions - key_positions)


# NumPy warns where the interpreter multiplies tokens of NaN.
ignore_nan = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
CASES = {
  "dot": {},
  "causal": {"mask": masks.causal(40)},
  "general": {"score": general()},
  "general half": {"score": general(jnp.bfloat16)},
  "soft cap": {"score": scores.soft_cap(scores.dot(), 5.0)},
  "modified": {"score": scores.modified(scores.scaled_dot(), nearer)},
  "normalised": {"score": scores.qk_norm(scores.dot())},
  "cosine": {"score": scores.cosine(jnp.float32(5.0))},
  "additive": {"score": additive()},
  "additive temperature": {"score": scores.temperature(additive(), 0.5)},
  "projected": {"score": additive(64)},
  "projected half": {"score": concat(jnp.bfloat16)},
  "manhattan": {"score": manhattan},
  "mapped product": {"score": mapped_product},
  "forgetting": {"score": forgetting()},
  "local-p": {"score": predicting()},
  "local-p of 8 units": {"score": predicting(units=8)},
  "general local-p": {"score": predicting(general())},
  "projected local-p": {"score": predicting(additive(64))},
  "normalised local-p": {"score": predicting(scores.qk_norm(scores.dot()))},
  # XLA maps the tokens, or the queries from which positions are predicted.
  "local-p of mapped keys": {"score": predicting(MappedKeys(scores.dot()))},
  "local-p of gains": {
    "score": predicting(scores.qk_norm(scores.dot(), *gains()))
  },
  "norms of local-p": {"score": scores.qk_norm(predicting(scores.dot()))},
  "local-p of lengths": {
    "score": predicting(length=jnp.float32(70.0), causal=False)
  },
  "Transformer-XL": {"score": transformer_xl()},
  "location": {"score": scores.location(0.3 * arrays((120, 64))[0])},
  "weighted distance": {
    "score": scores.soft_cap(scores.as_score(weighted_distance), 4.0)
  },
  "additive window": {"score": additive(), "mask": masks.sliding_window(20, 5)},
}
CAUSAL = {"mask": masks.causal(40)}
# With a mask or a bias, in which -inf hides a pair.
MASKED = {
  "hidden by bias": {
    "bias": np.where(np.arange(100) == 66, -np.inf, 0.5)[None].astype("f4")
  },
  "cap": {"score": scores.soft_cap(scores.dot(), 5.0), **CAUSAL},
  "causal forgetting": CASES["forgetting"] | CAUSAL,
  "causal local-p": {
    "score": scores.soft_cap(predicting(causal=True), 5.0),
    **CAUSAL,
  },
  "causal general local-p": CASES["general local-p"] | CAUSAL,
  "causal projected local-p": {
    "score": predicting(additive(64), causal=True),
    **CAUSAL,
  },
  "causal Transformer-XL": {
    "score": scores.soft_cap(transformer_xl(), 5.0),
    **CAUSAL,
  },
  "causal general": CASES["general"] | CAUSAL,
  "causal general half": CASES["general half"] | CAUSAL,
  "causal projected": CASES["projected"] | CAUSAL,
  "causal cosine": CASES["cosine"] | CAUSAL,
  "causal normalised": CASES["normalised"] | CAUSAL,
  "function without NaN": {"score": positive_differences, **CAUSAL},
}


def half_of_manhattan(query, key):
  return np.float64(0.5) * manhattan(query, key)


# Numbers of 64 bits under `jax_enable_x64`.
WIDE = {"score": half_of_manhattan, "bias": biases.alibi(2), **CAUSAL}


def close(got, want):
  if got.dtype == jax.dtypes.float0:  # the cotangent of an integer
    return
  got, want = (np.asarray(each, np.float32) for each in (got, want))
  finite = np.where(np.isfinite(want), want, 0.0)
  np.testing.assert_allclose(got, want, atol=0.02 * np.abs(finite).max())


def total(context, lse):
  """A number that depends on all finite results."""
  seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
  known = jnp.where(jnp.isfinite(context), context, 0.0)
  return jnp.sum(jnp.sin(known.astype(jnp.float32))) + jnp.sum(seen)


def results(implementation, tokens, score=None, **options):
  """The gradients of tokens and the score, the context and the lse."""

  def loss(tokens, score):
    context, lse = attend(
      *tokens,
      score=score,
      **options,
      implementation=implementation,
      return_lse=True,
    )
    return total(context, lse), (context, lse)

  gradient = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)
  score = scores.as_score(score or scores.scaled_dot())
  return jax.jit(gradient)(tokens, score)


def pulled_back(implementation, tokens, **options):
  """The gradients of tokens, also of rows of NaN, and the context."""

  def of_tokens(*tokens):
    return attend(*tokens, implementation=implementation, **options)

  def both(*tokens):
    context, pull_back = jax.vjp(of_tokens, *tokens)
    (cotangent,) = arrays(context.shape, seed=9, dtype=context.dtype)
    return pull_back(cotangent), context

  return jax.jit(both)(*tokens)


def check(tokens, results=results, **options):
  """Compares kernels with the reference, whose results it returns.

  The reference has the same tokens in float32: in bfloat16 it rounds normalised
  tokens, which the kernels do not.
  """
  got = results(INTERPRETED, tokens, **options)
  exact = [each.astype(jnp.float32) for each in tokens]
  want = results("reference", exact, **options)
  jax.tree.map(close, got, want)
  return want


def rows_of_nan(tokens, token, number="nan", feature=3, check=check, **options):
  """Checks results with `number` in a token; counts the rows that have NaN."""
  place = ["query", "key", "value"].index(token)
  first = (0,) * (tokens[place].ndim - 2)
  tokens[place] = tokens[place].at[*first, 66, feature].set(float(number))
  context, *_ = jax.tree.leaves(check(tokens, **options)[1])
  return np.isnan(np.asarray(context)).any(axis=-1).sum()


def check_hidden_tokens(lengths, visible, number="nan", features=64, **options):
  """Checks that `number` in tokens after those `visible` changes nothing."""
  rows, columns = visible
  mask = masks.where(lambda i, j: (i < rows) & (j < columns))

  @jax.jit
  def run(number):
    query, *others = arrays(*((length, features) for length in lengths))
    others = [each.at[columns:, 3].set(number) for each in others]
    tokens = [query.at[rows:, 3].set(number), *others]
    return results(INTERPRETED, tokens, mask=mask, **options)

  got, want = run(float(number)), run(1.0)
  (_, *gradients), _ = want[0]
  for each in gradients:
    assert not np.asarray(each[columns:]).any()
  assert np.isfinite(np.asarray(want[1][0], np.float32)).all()
  jax.tree.map(np.testing.assert_array_equal, got, want)


def outputs(implementation, tokens, **options):
  """The context and the lse."""
  options |= {"implementation": implementation, "return_lse": True}
  return jax.jit(lambda tokens: attend(*tokens, **options))(tokens)
