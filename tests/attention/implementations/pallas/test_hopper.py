"""The kernel for Hopper GPUs, interpreted, against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention import attend, biases, masks, scores
from attention.implementations import Pallas
from attention.implementations.pallas.hopper.tiles import parts
from attention.ring import ring_attention
from attention.scores.base import Wrapper
from tests.attention.oracle import draw
from tests.matrix import sampled

# The interpreter is not public in JAX 0.10.
params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
interpreter = pytest.importorskip(
  "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
)
INTERPRETED = Pallas(target="hopper", interpret=params.InterpretGPUParams())


def arrays(*shapes, seed=0, dtype=jnp.bfloat16):
  return [jnp.asarray(each, dtype) for each in draw(seed, *shapes)]


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


def running(query, key):
  return jnp.cumsum(query, axis=-1) @ key.mT


def mapped_product(query, key):
  return 0.1 * (jnp.sin(query) @ key.mT)


def positive_differences(query, key):
  difference = query[..., :, None, :] - key[..., None, :, :]
  return 0.1 * jnp.where(difference > 0.0, difference, 0.0).sum(-1)


def logarithm_of(score):
  """A wrapper whose result is -inf for half of the pairs."""
  return scores.modified(score, lambda s, i, j: jnp.log(jnp.maximum(s, 0.0)))


def scores_of_norms(query, key):
  lengths = jnp.linalg.norm(query, axis=-1)[..., :, None]
  return lengths * jnp.sum(key, axis=-1)[..., None, :]


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
  "additive window": {
    "score": additive(),
    "mask": masks.sliding_window(20, 5),
  },
}
# With a mask or a bias, in which -inf hides a pair.
MASKED = {
  "hidden by bias": {
    "bias": np.where(np.arange(100) == 66, -np.inf, 0.5)[None].astype("f4")
  },
  "cap": {
    "score": scores.soft_cap(scores.dot(), 5.0),
    "mask": masks.causal(40),
  },
  "causal forgetting": {"score": forgetting(), "mask": masks.causal(40)},
  "causal local-p": {
    "score": scores.soft_cap(predicting(causal=True), 5.0),
    "mask": masks.causal(40),
  },
  "causal general local-p": {
    "score": predicting(general()),
    "mask": masks.causal(40),
  },
  "causal projected local-p": {
    "score": predicting(additive(64), causal=True),
    "mask": masks.causal(40),
  },
  "causal Transformer-XL": {
    "score": scores.soft_cap(transformer_xl(), 5.0),
    "mask": masks.causal(40),
  },
  "causal general": {"score": general(), "mask": masks.causal(40)},
  "causal general half": {
    "score": general(jnp.bfloat16),
    "mask": masks.causal(40),
  },
  "causal projected": {"score": additive(64), "mask": masks.causal(40)},
  "causal cosine": {
    "score": scores.cosine(jnp.float32(5.0)),
    "mask": masks.causal(40),
  },
  "causal normalised": {
    "score": scores.qk_norm(scores.dot()),
    "mask": masks.causal(40),
  },
  "function without NaN": {
    "score": positive_differences,
    "mask": masks.causal(40),
  },
}


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


def exact_results(tokens, **options):
  """Those of the reference for the same tokens in float32."""
  # In bfloat16 it rounds normalised tokens, which the kernels do not.
  tokens = [each.astype(jnp.float32) for each in tokens]
  return results("reference", tokens, **options)


@sampled(
  # A test of other sizes has the projections.
  "name",
  [*CASES],
  default=["additive window", "forgetting", "local-p"],
)
def test_results_and_gradients_equal_the_reference(name):
  """With 50 queries and 100 keys, which are no whole tiles of 64."""
  tokens = arrays((50, 64), (100, 64), (100, 64))
  got = results(INTERPRETED, tokens, **CASES[name])
  jax.tree.map(close, got, exact_results(tokens, **CASES[name]))


def half_predicting():
  score = predicting()
  weights = score.query_weight, score.position_weight
  return scores.local(score.score, 40.0, *(x.astype("f2") for x in weights))


@sampled(
  "name", ["dot", "general", "cosine", "additive", "local-p"], default=[]
)
def test_float16_tokens(name):
  tokens = arrays((50, 64), (100, 64), (100, 64), dtype=jnp.float16)
  options = {"score": half_predicting()} if name == "local-p" else CASES[name]
  got = results(INTERPRETED, tokens, **options)
  jax.tree.map(close, got, exact_results(tokens, **options))


def test_masked_tokens_under_x64():
  tokens = arrays((70, 64), (100, 64), (100, 64))
  with jax.enable_x64(True):
    got = results(INTERPRETED, tokens, **MASKED["cap"])
    jax.tree.map(close, got, results("reference", tokens, **MASKED["cap"]))


@sampled("name", [*CASES, *MASKED], default=[])
def test_no_races_of_copies_with_computations(name):
  checked = params.InterpretGPUParams(detect_races=True)
  kernels = Pallas(target="hopper", interpret=checked)
  options = (CASES | MASKED)[name]
  tokens = arrays((50, 64), (100, 64), (100, 64))
  jax.block_until_ready(results(kernels, tokens, **options))
  assert not interpreter.get_races().races_found


def of_heads(name, channels, heads=(2,)):
  """A score with all parameters that it can have, of one or of all heads."""
  matrix, vector = (*heads, 64, channels), (*heads, channels)
  make, shapes = {
    "general": (scores.general, [(*heads, 64, 64)]),
    "additive": (scores.additive, [matrix, matrix, vector, vector]),
    "concat": (scores.concat, [(*heads, 128, channels), vector]),
    "local-p": (
      lambda *weights: scores.local(scores.scaled_dot(), 40.0, *weights),
      [matrix, vector],
    ),
  }[name]
  return make(*(0.1 * each for each in arrays(*shapes, dtype=jnp.float32)))


@sampled("mask", [None, masks.causal(40)], default=[None])
@sampled("name", ["additive", "concat"], default=["additive"])
def test_heads_with_parameters_of_their_own(name, mask):
  tokens = arrays((2, 2, 10, 64), (2, 1, 100, 64), (2, 2, 100, 64))
  options = {"score": of_heads(name, 8), "mask": mask}
  got = results(INTERPRETED, tokens, **options)
  jax.tree.map(close, got, results("reference", tokens, **options))


@sampled("mask", [None, masks.causal(40)], default=[masks.causal(40)])
# With one reciprocal for two, or not, and with projections in the kernels.
@sampled("channels", [8, 6, 64], default=[8])
def test_additive_scores_of_large_features(channels, mask):
  """Which products of exponentials would exceed."""
  tokens = arrays((70, 64), (100, 64), (100, 64))
  tokens[0] = tokens[0].at[3].multiply(30)
  tokens[1] = tokens[1].at[80].set(-tokens[0][3])  # sums are small again
  options = {"score": additive(channels), "mask": mask}
  got = results(INTERPRETED, tokens, **options)
  jax.tree.map(close, got, results("reference", tokens, **options))


@ignore_nan
@sampled("channels", [8, 64], default=[64])
def test_nan_and_large_features_of_an_additive_score_in_a_tile(channels):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  tokens[0] = tokens[0].at[3, 3].set(jnp.nan).at[4].multiply(60)
  options = {"score": additive(channels)}
  got = outputs(INTERPRETED, tokens, **options)
  jax.tree.map(close, got, outputs("reference", tokens, **options))


@sampled("name", ["dot", "additive"], default=[])
def test_heads_that_share_keys_sum_their_gradients(name):
  tokens = arrays((2, 3, 10, 64), (2, 1, 70, 64), (1, 3, 70, 64))
  got = results(INTERPRETED, tokens, **CASES[name])
  jax.tree.map(close, got, results("reference", tokens, **CASES[name]))


@sampled("name", ["lengths", "segments", "alibi", "keys"], default=["alibi"])
@sampled("score", ["dot", "additive"], default=["dot"])
def test_masks_and_biases_with_arrays(name, score):
  lengths = masks.padding(jnp.asarray([70, 0]))
  ids = jnp.arange(70)[None] // jnp.asarray([[20], [33]])
  options = {
    "lengths": {"mask": lengths},
    "segments": {"mask": masks.segments(ids, ids)},
    "alibi": {"bias": biases.alibi(2), "mask": lengths & masks.causal()},
    "keys": {"mask": (ids < 2)[:, None, None]},
  }[name]
  tokens = arrays((2, 2, 70, 64), (2, 2, 70, 64), (2, 2, 70, 64))
  options |= CASES[score]
  got = results(INTERPRETED, tokens, **options)
  jax.tree.map(close, got, results("reference", tokens, **options))


def pairs(*shape, seed=4):
  """Numbers of pairs, of which about a third is -inf."""
  numbers = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(np.where(numbers > 0.5, -np.inf, numbers), jnp.float32)


# Arrays of pairs, for 2 x 2 heads of 70 queries and 100 keys.
OF_PAIRS = {
  "mask": {"mask": pairs(2, 1, 70, 100) < 0.0},
  "mask of all": {"mask": pairs(70, 100) < 0.0},
  "bias": {"bias": pairs(2, 70, 100)},
  "half bias and mask": {
    "bias": pairs(2, 2, 70, 100).astype(jnp.bfloat16),
    "mask": (pairs(1, 2, 70, 100, seed=5) < 0.0) | masks.causal(),
  },
}


@ignore_nan
@sampled("number", ["0", "nan", "inf"], default=["nan"])
@sampled("score", ["dot", "additive", "cosine"], default=["dot"])
@sampled("name", [*OF_PAIRS], default=["half bias and mask"])
def test_masks_and_biases_with_numbers_of_pairs(name, score, number):
  """With NaN in a few tokens, which many rows then attend to."""
  tokens = arrays((2, 2, 70, 64), (2, 1, 100, 64), (2, 2, 100, 64))
  tokens[0] = tokens[0].at[0, 0, 66, 3].set(float(number))
  tokens[1] = tokens[1].at[1, 0, 80, 3].set(float(number))
  tokens[2] = tokens[2].at[0, 1, 70, 3].set(float(number))
  options = OF_PAIRS[name] | CASES[score]
  got = results(INTERPRETED, tokens, **options)
  want = exact_results(tokens, **options)
  is_nan = np.isnan(np.asarray(want[1][0]))
  assert number == "0" or 0 < is_nan.sum() < is_nan.size
  jax.tree.map(close, got, want)


def test_gradient_of_a_bias_of_pairs():
  """By the rule of the tiles, which no kernel computes."""
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))

  def gradient(implementation):
    def loss(bias):
      context = attend(*tokens, bias=bias, implementation=implementation)
      return jnp.sum(jnp.sin(context.astype(jnp.float32)))

    return jax.jit(jax.grad(loss))(jnp.where(pairs(70, 100) > 0.0, 1.0, 0.0))

  close(gradient(INTERPRETED), gradient("reference"))


@ignore_nan
@sampled("number", ["nan", "-inf"], default=["nan"])
@sampled("token", ["query", "key", "value"], default=["key"])
@sampled(
  "name", ["causal", "additive window", *MASKED], default=["hidden by bias"]
)
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(
  name, token, number
):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  place = ["query", "key", "value"].index(token)
  tokens[place] = tokens[place].at[66, 3].set(float(number))
  options = (CASES | MASKED)[name]
  got = results(INTERPRETED, tokens, **options)
  want = exact_results(tokens, **options)
  context = np.asarray(want[1][0])
  num_nan = np.isnan(context).all(axis=-1).sum()
  is_hidden = name == "hidden by bias" and token != "query"
  assert num_nan == 0 if is_hidden else 0 < num_nan < len(context)
  jax.tree.map(close, got, want)


@ignore_nan
@sampled("number", ["nan", "inf"], default=["nan"])
@sampled(
  "name",
  [
    *("dot", "general", "cosine", "soft cap"),
    *("additive", "projected", "manhattan"),
  ],
  default=["dot"],  # roots, below, have a sum over features too
)
def test_numbers_of_hidden_tokens_change_nothing(name, number):
  mask = masks.where(lambda i, j: (i < 6) & (j < 66))
  options = CASES[name] | {"mask": mask}

  def with_hidden(number):
    query, *others = arrays((10, 64), (100, 64), (100, 64))
    others = [each.at[66:, 3].set(number) for each in others]
    return [query.at[6:, 3].set(number), *others]

  got = results(INTERPRETED, with_hidden(float(number)), **options)
  want = results(INTERPRETED, with_hidden(0.0), **options)
  assert np.isfinite(np.asarray(want[1][0], np.float32)).all()
  jax.tree.map(np.testing.assert_array_equal, got, want)


def roots(query, key):
  """A score with infinite derivatives at a token of zeros."""
  products = query[..., :, None, :] * key[..., None, :, :]
  return 0.1 * (products - jnp.sqrt(jnp.abs(key))[..., None, :, :]).sum(-1)


@ignore_nan
def test_gradients_of_hidden_nan_are_zero_where_derivatives_are_infinite():
  tokens = arrays((10, 64), (100, 64), (100, 64))
  options = {"score": roots, "mask": masks.where(lambda i, j: j < 66)}
  want = results(INTERPRETED, tokens, **options)[0][0]
  tokens[1] = tokens[1].at[66:, 3].set(jnp.nan)
  got = results(INTERPRETED, tokens, **options)[0][0]
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert not np.asarray(got[1][66:]).any()


@ignore_nan
@sampled("name", ["dot", "additive", "manhattan"], default=["dot"])
def test_a_cotangent_of_nan_is_not_replaced(name):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  tokens[2] = tokens[2].at[99].set(jnp.nan)  # whose rows have no derivatives
  cotangent = jnp.ones((70, 64), jnp.bfloat16).at[5, 3].set(jnp.nan)

  def gradients(implementation):
    def context(*tokens):
      return attend(
        *tokens,
        score=CASES[name].get("score", scores.scaled_dot()),
        mask=masks.causal(40),
        implementation=implementation,
      )

    return jax.jit(lambda *x: jax.vjp(context, *x)[1](cotangent))(*tokens)

  got, want = gradients(INTERPRETED), gradients("reference")
  for each, expected in zip(got, want):
    is_nan = np.isnan(np.asarray(expected, np.float32))
    assert is_nan.any()
    assert np.isnan(np.asarray(each, np.float32)[is_nan]).all()


def test_a_number_of_one_head_in_the_map_of_a_token():
  tokens = arrays((1, 64, 64), (1, 64, 64), (1, 64, 64))

  def gradients(sharpness):
    score = scores.cosine(jnp.full(sharpness, 5.0, jnp.float32))
    return results(INTERPRETED, tokens, score=score)[0]

  for got, want in zip(*map(jax.tree.leaves, map(gradients, [(1,), ()]))):
    close(got.reshape(want.shape), want)


@pytest.fixture
def launched(monkeypatch):
  """The kernels that have been called."""
  kernel, calls = plgpu.kernel, []

  def count(*arguments, **options):
    calls.append(arguments)
    return kernel(*arguments, **options)

  monkeypatch.setattr(plgpu, "kernel", count)
  return calls


@ignore_nan
@sampled("mask", [None, masks.causal(40)], default=[masks.causal(40)])
@sampled("name", ["cosine", "normalised"], default=["cosine"])
def test_kernels_compute_norms_and_their_transposes(name, mask, launched):
  tokens = arrays((1, 2, 64, 64), (1, 1, 128, 64), (1, 2, 128, 64))
  if mask is not None:
    tokens[1] = tokens[1].at[:, :, 66, 3].set(jnp.inf)
  options = CASES[name] | {"mask": mask}
  got = results(INTERPRETED, tokens, **options)
  assert len(launched) == 4
  jax.tree.map(close, got, exact_results(tokens, **options))


def capped(score):
  """A score of a number that it uses twice."""
  return lambda number: scores.soft_cap(score(number), number)


@sampled("score", ["cosine", "temperature"], default=["cosine"])
def test_a_number_that_is_used_twice_has_both_gradients(score, launched):
  make = capped(
    {
      "cosine": scores.cosine,
      "temperature": lambda number: scores.temperature(scores.dot(), number),
    }[score]
  )

  def gradient(implementation):
    def loss(number, *tokens):
      context = attend(
        *tokens, score=make(number), implementation=implementation
      )
      return jnp.sum(jnp.sin(context.astype(jnp.float32)))

    # The number is one tracer in both places.
    tokens = arrays((64, 64), (64, 64), (64, 64))
    return jax.jit(jax.grad(loss))(jnp.float32(3.0), *tokens)

  got, want = gradient(INTERPRETED), gradient("reference")
  # None for the gradients of keys and values, and one for the scales of keys.
  assert len(launched) == {"cosine": 3, "temperature": 2}[score]
  np.testing.assert_allclose(got, want, rtol=0.02)


# The kernels of a gradient: three of attention, and one that sums the gradients
# of matrices or computes the scales of keys.
KERNELS = {
  "local-p": 4,
  "local-p of lengths": 4,
  "norms of local-p": 4,
  "general local-p": 4,
  "projected local-p": 4,
  "normalised local-p": 5,
  "cosine": 4,
  "normalised": 4,
  "general": 4,
  "general half": 4,
  "projected": 4,
  "projected half": 4,
  "Transformer-XL": 4,
  "forgetting": 6,  # three for the sums of gates, of which a check traces one
}


@ignore_nan
@sampled("heads", [(), (2,)], default=[(2,)])
@sampled("mask", [None, masks.causal(40)], default=[masks.causal(40)])
@sampled(
  "name", ["general", "additive", "concat", "local-p"], default=["general"]
)
def test_blocks_sum_the_gradients_of_parameters(
  name, heads, mask, launched, monkeypatch
):
  """Of one for all heads, or of one for each, in a block of several tiles."""
  monkeypatch.setattr(parts, "AT_ONCE", 8)  # 2 blocks for 5 tiles
  shared = (2, 1) if name == "general" else (2, 2)
  tokens = arrays((2, 2, 300, 64), (*shared, 64, 64), (2, 2, 64, 64))
  if mask is not None:
    tokens[0] = tokens[0].at[:, :, 3, 5].set(jnp.nan)
  options = {"score": of_heads(name, 64, heads), "mask": mask}
  got = results(INTERPRETED, tokens, **options)
  assert len(launched) == 4
  jax.tree.map(close, got, results("reference", tokens, **options))


@sampled("name", [*CASES], default=["additive", "projected", "forgetting"])
def test_the_number_of_kernels_of_a_gradient(name, launched):
  tokens = arrays((70, 64), (70, 64), (70, 64))
  jax.eval_shape(lambda: results(INTERPRETED, tokens, **CASES[name]))
  assert len(launched) == KERNELS.get(name, 3)


@pytest.mark.parametrize(
  ("place", "kernels"), [("query_weight", 3), ("key_weight", 4), ("bias", 3)]
)
def test_the_gradient_of_one_parameter(place, kernels, launched):
  """Which needs the kernel of keys if it is that of keys."""
  score = of_heads("additive", 64, heads=())
  tokens = arrays((10, 64), (100, 64), (100, 64))

  def gradient(implementation):
    def loss(parameter, *tokens):
      context = attend(
        *tokens,
        score=dataclasses.replace(score, **{place: parameter}),
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(context.astype(jnp.float32)))

    return jax.eval_shape(jax.grad(loss), getattr(score, place), *tokens)

  gradient(INTERPRETED)
  assert len(launched) == kernels


@pytest.mark.parametrize(
  ("tokens", "matrices", "kernels"),
  [
    (jnp.float16, jnp.float16, 4),
    (jnp.float16, jnp.bfloat16, 3),  # XLA projects: float16 has not its range
    (jnp.float16, jnp.float32, 3),
    (jnp.bfloat16, jnp.float16, 3),
  ],
)
def test_dtypes_of_projections(tokens, matrices, kernels, launched):
  given = arrays((64, 64), (64, 64), (64, 64), dtype=tokens)
  score = concat(matrices)
  jax.eval_shape(lambda: results(INTERPRETED, given, score=score))
  assert len(launched) == kernels


@sampled("sizes", [(64, 128, 64), (128, 64, 64)], default=[(128, 64, 64)])
def test_projected_tokens_of_other_sizes(sizes, launched):
  query_size, key_size, size = sizes
  weights = arrays((query_size, 64), (key_size, 64), (64,), seed=1)
  score = scores.additive(*(0.2 * each for each in weights))
  shapes = (10, query_size), (100, key_size), (100, size)
  tokens = [0.7 * each for each in arrays(*shapes)]
  options = {"score": score, "mask": masks.causal(40)}
  got = results(INTERPRETED, tokens, **options)
  assert len(launched) == 4
  jax.tree.map(close, got, results("reference", tokens, **options))


def test_second_derivatives_of_projected_tokens():
  tokens = arrays((10, 64), (20, 64), (20, 64))

  def tangent(implementation):
    def loss(query):
      context = attend(
        query, *tokens[1:], score=additive(64), implementation=implementation
      )
      return jnp.sum(jnp.sin(context.astype(jnp.float32)))

    return jax.jvp(jax.grad(loss), (tokens[0],), (tokens[0],))[1]

  close(tangent(INTERPRETED), tangent("reference"))


class Halved(scores.dot):
  """A dot product with other scores."""

  def pair(self, query, key):
    return 0.5 * super().pair(query, key)


def test_a_class_that_inherits_from_a_dot_product_computes_its_scores():
  tokens = arrays((10, 64), (20, 64), (20, 64))
  got = outputs(INTERPRETED, tokens, score=Halved())
  jax.tree.map(close, got, outputs("reference", tokens, score=Halved()))


def test_shards_of_a_mesh_need_types_that_are_not_checked():
  """Of one device: the interpreter of GPUs waits forever on two."""
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((1,), ("batch",), axis_types=auto)
  spec = jax.sharding.PartitionSpec("batch")
  (tokens,) = arrays((2, 64, 64))

  def of_shards(check_vma):
    attention = jax.shard_map(
      lambda tokens: attend(*[tokens] * 3, implementation=INTERPRETED),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
      check_vma=check_vma,
    )
    return jax.jit(attention)(tokens)

  with pytest.raises(NotImplementedError, match="check_vma=False"):
    of_shards(check_vma=True)
  want = attend(*[tokens] * 3, implementation="reference")
  close(of_shards(check_vma=False), want)


@sampled("name", ["causal", "cap"], default=[])
def test_kernels_of_a_ring(name):
  """Of one device, as the interpreter has the state of one."""
  mesh = jax.make_mesh(
    (1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  options = (CASES | MASKED)[name]
  tokens = arrays((128, 64), (128, 64), (128, 64))

  def gradients(attend, **options):
    def loss(*tokens):
      return jnp.sum(jnp.sin(attend(*tokens, **options).astype(jnp.float32)))

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*tokens)

  def around(*tokens):
    spec = jax.sharding.PartitionSpec("sequence")
    return jax.shard_map(
      lambda *tokens: ring_attention(
        *tokens,
        axis_name="sequence",
        implementation=INTERPRETED,
        **options,
      ),
      mesh=mesh,
      in_specs=(spec,) * 3,
      out_specs=spec,
      check_vma=False,
    )(*tokens)

  got = gradients(around)
  want = gradients(attend, implementation="reference", **options)
  jax.tree.map(close, got, want)


def test_what_the_kernel_does_not_support_is_an_error_that_says_why():
  def refused(reason, features=64, dtype=jnp.bfloat16, **options):
    tokens = jnp.ones((2, 8, features), dtype)
    with pytest.raises(NotImplementedError, match=reason):
      attend(tokens, tokens, tokens, implementation=INTERPRETED, **options)

  refused("the operation cumsum", score=running)
  refused("one sum over the features", score=scores_of_norms)
  refused("bfloat16 or float16", dtype=jnp.float32)
  refused("a multiple of 64", features=48)
  refused("by position that are shifted", score=forgetting().shifted(3))


def outputs(implementation, tokens, **options):
  """The context and the lse."""
  options |= {"implementation": implementation, "return_lse": True}
  return jax.jit(lambda tokens: attend(*tokens, **options))(tokens)


@ignore_nan
@sampled("token", ["key", "value"], default=["key"])
def test_minus_infinity_of_a_wrapper_hides_no_nan(token):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  place = ["query", "key", "value"].index(token)
  tokens[place] = tokens[place].at[66, 3].set(jnp.nan)
  options = {"score": logarithm_of(scores.dot()), "mask": masks.causal(40)}
  got = outputs(INTERPRETED, tokens, **options)
  jax.tree.map(close, got, outputs("reference", tokens, **options))


@sampled("name", ["dot"], default=[])
def test_without_a_mask_infinite_scores_are_nan_in_gradients_of_values(name):
  query, key, value = arrays((70, 64), (70, 64), (70, 64))
  signs = 1e20 * jnp.sign(query[3])
  tokens = query.at[3].set(signs), key.at[5].set(signs), value
  (_, _, got), _ = results(INTERPRETED, tokens, scores.dot())[0]
  (_, _, want), _ = results("reference", tokens, scores.dot())[0]
  assert np.isnan(np.asarray(want, np.float32)).any()
  close(got, want)
