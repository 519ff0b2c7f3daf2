"""Kernels, interpreted, against the reference."""

import dataclasses
import functools
from itertools import filterfalse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from attention import attend, biases, masks, normalizers, scores
from attention.implementations import BY_NAME, Pallas
from attention.implementations.pallas import blockwise_rule, call
from tests.attention.comparison import equations
from tests.attention.oracle import draw
from tests.matrix import sampled
from tests.meshes import make_mesh

INTERPRETED = Pallas(interpret=True, query_block=128, key_block=128)
SHAPES = ((2, 3, 150, 8), (2, 3, 200, 8), (2, 3, 200, 4))
GENERATOR = np.random.default_rng(0)
IDS = jnp.asarray(np.sort(GENERATOR.integers(0, 4, (2, 200)), axis=-1))
TABLE = jnp.asarray(GENERATOR.normal(size=(3, 150, 200)), jnp.float32)


def arrays(*shapes, seed=0, dtype=jnp.float32):
  return draw(seed, *shapes, dtype=dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SquaredPart(normalizers.Normalizer):
  """A weight that has no derivative at -inf."""

  is_elementwise = True
  ignores_hidden = True

  def __call__(self, scores):
    return jnp.sqrt(scores * scores + 1.0) + scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Inverse(normalizers.OnlineNormalizer):
  """A normalizer with an operation that kernels do not have."""

  def terms(self, scores, maximum):
    parts = jax.lax.erf_inv(scores - maximum)
    return parts, parts


def manhattan(query, key):
  gap = query[..., :, None, :] - key[..., None, :, :]
  return -jnp.sum(jnp.abs(gap), axis=-1)


WEIGHT, OTHER, VECTOR, OF_HEADS = arrays((8, 6), (8, 6), (6,), (3,), seed=1)
ADDITIVE = {"score": scores.additive(WEIGHT, OTHER, VECTOR)}
CAUSAL = {"mask": masks.causal(50)}
PADDING = {"mask": masks.padding(jnp.array([130, 0]))}
# Options of `attend`, by the name of what is special; "dropout" is the rate.
CASES = {
  "dot": lambda: {},
  "causal": lambda: CAUSAL,
  "window": lambda: {"mask": masks.sliding_window(30, 0)},
  "padding": lambda: PADDING,
  "segments": lambda: {"mask": masks.segments(IDS[:, :150], IDS)},
  "where": lambda: {"mask": masks.where(lambda i, j: (i + j) % 3 > 0)},
  "positions": lambda: {"mask": masks.causal().at(IDS[:, :150] * 40)},
  "array mask": lambda: {"mask": TABLE > 0.0},
  "alibi": lambda: {"bias": biases.alibi(3)},
  "array bias": lambda: {"bias": TABLE},
  "scaled bias": lambda: {"bias": 0.5 * biases.alibi(3) + TABLE[:1]},
  "heads": lambda: {"score": scores.scaled_dot(scale=OF_HEADS)},
  "general": lambda: {"score": scores.general(WEIGHT @ OTHER.T)},
  "additive": lambda: ADDITIVE,
  "additive padding": lambda: {**ADDITIVE, **PADDING},
  "many channels": lambda: {
    "score": scores.additive(*arrays((8, 300), (8, 300), (300,), seed=2))
  },
  "cosine": lambda: {"score": scores.cosine(2.0)},
  "soft cap": lambda: {"score": scores.soft_cap(scores.dot(), 5.0)},
  "temperature": lambda: {
    "score": scores.temperature(scores.dot(), 2.0 + jnp.abs(OF_HEADS))
  },
  "manhattan": lambda: {"score": scores.as_score(manhattan)},
  "closure": lambda: {
    "score": scores.as_score(lambda q, k: jnp.sin(q @ WEIGHT) @ (k @ OTHER).mT)
  },
  "positional": lambda: {
    "score": scores.positional(lambda q, k, i, j: q @ k.mT - 0.1 * abs(i - j))
  },
  "local": lambda: {"score": scores.local(scores.dot(), 40)},
  "predicted": lambda: {
    "score": scores.local(scores.dot(), 40, WEIGHT, VECTOR)
  },
  "wide window": lambda: {
    "score": scores.local(scores.dot(), 400, WEIGHT, VECTOR)
  },
  "concat": lambda: {
    "score": scores.concat(jnp.concatenate([WEIGHT, OTHER]), VECTOR)
  },
  "QK norm": lambda: {
    "score": scores.qk_norm(scores.scaled_dot(scale=OF_HEADS))
  },
  "Transformer-XL": lambda: {
    "score": scores.transformer_xl(*arrays((8, 8), (8,), (8,), seed=3))
  },
  "Shaw": lambda: {"score": scores.shaw(*arrays((21, 8), seed=4))},
  "Shaw of heads": lambda: {"score": scores.shaw(*arrays((3, 301, 8), seed=4))},
  "one distance": lambda: {"score": scores.shaw(*arrays((1, 8), seed=4))},
  "disentangled": lambda: {
    "score": scores.disentangled(*arrays((20, 8), (20, 8), seed=4))
  },
  "as released": lambda: {
    "score": scores.disentangled(
      *arrays((3, 20, 8), (3, 20, 8), seed=4), as_released=True
    )
  },
  "location": lambda: {"score": scores.location(*arrays((201, 8), seed=4))},
  "few locations": lambda: {
    "score": scores.location(*arrays((3, 170, 8), seed=4))
  },
  "forgetting": lambda: {
    "score": scores.forgetting(
      scores.dot(), -jnp.abs(*arrays((2, 1, 200), seed=4))
    ),
    "mask": masks.causal(),
  },
  "long forgetting": lambda: {
    "score": scores.soft_cap(
      scores.forgetting(scores.dot(), 0.1 * arrays((3, 300), seed=4)[0]), 9.0
    )
  },
  "T5": lambda: {
    "bias": biases.relative_position(
      arrays((8, 3), seed=4)[0].at[2].set(-jnp.inf), max_distance=40
    ),
    "mask": masks.causal(),
  },
  "T5 later": lambda: {
    "bias": 0.5 * biases.relative_position(*arrays((8, 1))).shifted(60)
  },
  "sink": lambda: {"normalizer": normalizers.softmax(sink=OF_HEADS)},
  "dropout": lambda: {"dropout": 0.3, **CAUSAL},
  "all dropped": lambda: {"dropout": 1.0},
  "softpick dropout": lambda: {
    "dropout": 0.3,
    "normalizer": normalizers.softpick(),
    "score": scores.local(scores.cosine(2.0), 60),
  },
  "softpick": lambda: {"normalizer": normalizers.softpick()},
  "softpick causal": lambda: {
    "normalizer": normalizers.softpick(),
    **ADDITIVE,
    **CAUSAL,
  },
  "signed": lambda: {"normalizer": normalizers.signed_softmax(), **PADDING},
  "entmax": lambda: {"normalizer": normalizers.entmax(), **ADDITIVE, **CAUSAL},
  "entmax of a function": lambda: {
    "normalizer": normalizers.entmax(1.2),
    "score": scores.as_score(lambda query, key: 2.0 * jnp.tanh(query @ key.mT)),
    "dropout": 0.3,
  },
  "sparsemax": lambda: {
    "normalizer": normalizers.sparsemax(),
    "score": scores.cosine(2.0),
    **PADDING,
  },
  "sigmoid": lambda: {"normalizer": normalizers.sigmoid(-2.0)},
  "sigmoid of heads": lambda: {
    "normalizer": normalizers.sigmoid(OF_HEADS),
    "score": scores.cosine(2.0),
    **PADDING,
  },
  "own normalizer": lambda: {
    "normalizer": SquaredPart(),
    "bias": jnp.where(TABLE > 1.0, -jnp.inf, TABLE),
  },
}


def results(tokens, implementation, arguments):
  """The context, the lse and the gradients of tokens and parameters."""
  arguments = {**arguments}
  rate = arguments.pop("dropout", 0.0)
  softmax = normalizers.softmax()
  has_lse = normalizers.is_softmax(arguments.get("normalizer", softmax))

  def loss(tokens, arguments):
    result = attend(
      *tokens,
      **arguments,
      implementation=implementation,
      return_lse=has_lse,
      dropout_rate=rate,
      rng=jax.random.key(5),
    )
    context, lse = result if has_lse else (result, jnp.zeros(()))
    seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(jnp.sin(context)) + jnp.sum(seen**2), (context, lse)

  run = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)
  gradients, outputs = jax.jit(run)(tokens, arguments)
  floating = [
    each
    for each in jax.tree.leaves(gradients)
    if each.dtype != jax.dtypes.float0
  ]
  return outputs, floating


def close(got, want, tolerance):
  def check(got, want):
    got, want = (np.asarray(each, np.float64) for each in (got, want))
    scale = np.max(np.abs(want), where=np.isfinite(want), initial=1.0)
    np.testing.assert_allclose(
      got, want, rtol=tolerance, atol=tolerance * scale
    )

  jax.tree.map(check, got, want)


# A test of matrices, below, has additive scores of several tiles.
@sampled("name", CASES, default=["dropout"])
def test_results_and_gradients_equal_the_reference(name):
  tokens = arrays(*SHAPES)
  arguments = CASES[name]()
  got = results(tokens, INTERPRETED, arguments)
  close(got, results(tokens, "reference", arguments), 1e-4)


def of_both(function, *arrays):
  """What a function of arrays returns with kernels and with the reference."""

  @jax.jit
  def results(*arrays):
    each = (INTERPRETED, "reference")
    return [function(*arrays, implementation=x) for x in each]

  return results(*arrays)


def later_heads(numbers, batch, head, query_positions, key_positions):
  """A change of scores that depends on the indices of leading axes."""
  distance = jnp.abs(query_positions - key_positions)
  return numbers - 0.1 * (batch + head) * distance


def test_indices_of_leading_axes_that_only_values_have():
  tokens = arrays((3, 4, 8), (3, 6, 8), (2, 3, 6, 8))
  score = scores.modified(scores.dot(), later_heads, with_indices=True)
  close(*of_both(functools.partial(attend, score=score), *tokens), 1e-4)


@sampled(
  "name",
  ["softpick causal", "sigmoid of heads", "wide window", "entmax", "sparsemax"],
  default=[],
)
def test_nan_is_in_the_rows_that_attend_to_it(name):
  query, key, value = arrays(*SHAPES)
  tokens = (
    query.at[:, 0, 70].set(jnp.nan).at[1, 1, 20].set(jnp.nan),
    key.at[0, 1, 190].set(jnp.inf),
    value.at[0, 2, 30, 1].set(jnp.nan),
  )
  arguments = {"mask": masks.padding(jnp.array([180, 0]))} | CASES[name]()
  want = results(tokens, "reference", arguments)
  assert np.isnan(want[0][0]).any()
  close(results(tokens, INTERPRETED, arguments), want, 1e-4)


def test_gradient_of_a_bias_with_integers_of_64_bits():
  (tokens,) = arrays((1, 2, 5, 4))
  arguments = {"bias": jnp.zeros((2, 5, 5), jnp.float32)}

  @jax.grad
  def gradient(arguments, implementation):
    context = attend(
      tokens, tokens, tokens, implementation=implementation, **arguments
    )
    return jnp.sum(context**2)

  with jax.enable_x64(True):
    got, want = of_both(gradient, arguments)
  close(got, want, 1e-4)


def test_a_bias_hides_keys_whose_scores_overflow():
  query, key, value = arrays(*SHAPES)
  large = 2.0 * jnp.ones_like(query), key.at[:, :, 190:].set(3e38), value
  hidden = jnp.arange(key.shape[-2]) >= 190
  arguments = {"bias": jnp.where(hidden, -jnp.inf, 0.0)[None]}
  want = results(large, "reference", arguments)
  assert np.isfinite(want[0][0]).all()
  close(results(large, INTERPRETED, arguments), want, 1e-4)


@sampled("heads", [(), (2,)], default=[(2,)])
def test_matrices_are_read_with_their_longer_axis_last(heads):
  query_weight, *rest = arrays((*heads, 128, 4), (128, 4), (4,), seed=1)
  score = scores.additive(0.1 * query_weight, *(0.1 * each for each in rest))
  tokens = arrays((2, 2, 130, 128), (2, 2, 150, 128), (2, 2, 150, 4))
  arguments = {"score": score, **PADDING}
  got = results(tokens, INTERPRETED, arguments)
  close(got, results(tokens, "reference", arguments), 1e-4)


def test_a_number_that_is_used_twice_has_both_gradients():
  def gradient(*arguments, implementation):
    def loss(number, *tokens):
      score = scores.soft_cap(scores.cosine(number), number)
      context = attend(*tokens, score=score, implementation=implementation)
      return jnp.sum(jnp.sin(context))

    # The number is one tracer in both places.
    return jax.grad(loss)(*arguments)

  close(*of_both(gradient, jnp.float32(3.0), *arrays(*SHAPES)), 1e-4)


@sampled(
  "name",
  ["additive", "causal", "many channels", "entmax"],
  default=["additive", "entmax"],
)
def test_a_gradient_is_three_kernels_without_sums_besides(name):
  names, sums = operations_of_a_gradient(name)
  assert names.count("pallas_call") == 3
  assert "dot_general" not in names
  # Axes of size 1 are removed by sums over them.
  assert all(
    each.invars[0].aval.size == each.outvars[0].aval.size for each in sums
  )


@sampled(
  "name",
  ["Shaw", "as released", "location", "forgetting", "T5"],
  default=["forgetting"],
)
def test_kernels_compute_gradients_of_arrays_by_distance_or_position(name):
  names, _ = operations_of_a_gradient(name)
  # Sums of gates, and their transposes, are kernels too.
  assert names.count("pallas_call") == (5 if name == "forgetting" else 3)
  assert not {"dot_general", "scan", "while"} & set(names)


@sampled(
  "shape",
  [
    (150, 200),
    (3, 150, 200),
    (2, 1, 150, 200),
    (2, 3, 150, 200),
    (3, 1, 200),
    (150, 1),
    (2, 1, 1, 200),
    (3, 1, 1),
  ],
  default=[(3, 150, 200), (2, 1, 1, 200)],
)
def test_kernels_compute_the_gradient_of_an_array_as_a_bias(shape):
  *tokens, bias = arrays(*SHAPES, shape)
  # Some tiles are hidden, some queries see no key, and a key is NaN.
  mask = masks.sliding_window(60, 20) & masks.padding(jnp.array([130, 0]))
  tokens[1] = tokens[1].at[0, 0, 60].set(jnp.nan)

  def gradients(implementation, *arguments):
    def loss(*arguments):
      *tokens, bias = arguments
      context = attend(
        *tokens,
        mask=mask,
        bias=bias + 0.5,
        # For softmax the sum of a row's gradients is 0.
        normalizer=normalizers.sigmoid(),
        implementation=implementation,
      )
      return jnp.sum(jnp.where(jnp.isnan(context), 0.0, jnp.sin(context)))

    return jax.grad(loss, (0, 1, 2, 3))(*arguments)

  jitted = jax.jit(gradients, static_argnums=0)
  traced = jitted.trace(INTERPRETED, *tokens, bias)
  got = traced.lower().compile()(*tokens, bias)
  close(got, jitted("reference", *tokens, bias), 1e-4)
  found = equations(traced.jaxpr.jaxpr, without=["pallas_call"])
  names = [each.primitive.name for each in found]
  # An array of pairs has a kernel of its own.
  assert names.count("pallas_call") == 3 + (min(shape[-2:]) > 1)
  assert not {"dot_general", "scan", "while"} & set(names)


@pytest.mark.parametrize("name", ["shifted", "score"])
def test_all_uses_of_an_array_have_gradients(name):
  shape = {"shifted": (3, 150, 200), "score": ()}[name]
  *tokens, array = arrays(*SHAPES, shape)

  def gradient(implementation, array, *tokens):
    def loss(array):
      score, bias = scores.scaled_dot(), biases.as_bias(array)
      if name == "score":
        score = scores.modified(score, lambda score, i, j: score * array)
      else:
        bias = bias + biases.as_bias(array).shifted(3)
      options = {"score": score, "normalizer": normalizers.sigmoid()}
      options["implementation"] = implementation
      return jnp.sum(jnp.sin(attend(*tokens, bias=bias, **options)))

    return jax.grad(loss)(array)

  # With arguments of a jitted function both uses are one tracer.
  gradient = jax.jit(gradient, static_argnums=0)
  got = gradient(INTERPRETED, array, *tokens)
  close(got, gradient("reference", array, *tokens), 1e-4)


def test_the_kernel_of_an_array_of_pairs_writes_its_dtype():
  *tokens, bias = arrays(*SHAPES, (3, 150, 200), dtype=jnp.bfloat16)

  def gradient(bias, implementation=INTERPRETED):
    def loss(bias):
      return attend(*tokens, bias=bias, implementation=implementation).sum()

    return jax.grad(loss)(bias)

  jitted = jax.jit(gradient, static_argnums=1)
  traced = jitted.trace(bias)
  calls = [
    each
    for each in equations(traced.jaxpr.jaxpr, without=["pallas_call"])
    if each.primitive.name == "pallas_call"
  ]
  # Otherwise XLA would convert an array of float32 of this size.
  assert calls[-1].outvars[0].aval.dtype == jnp.bfloat16
  close(traced.lower().compile()(bias), jitted(bias, "reference"), 1e-2)


def operations_of_a_gradient(name):
  """The names of operations, and those that are sums."""
  tokens = arrays((2, 3, 128, 8), (2, 3, 128, 8), (2, 3, 128, 4))
  arguments = CASES[name]()

  def gradients(tokens, arguments, cotangent):
    def context(tokens, arguments):
      return attend(*tokens, **arguments, implementation=INTERPRETED)

    _, pull_back = jax.vjp(context, tokens, arguments)
    return pull_back(cotangent)

  cotangent = jnp.ones((2, 3, 128, 4))
  program = jax.make_jaxpr(gradients)(tokens, arguments, cotangent)
  found = [*equations(program.jaxpr, without=["pallas_call"])]
  names = [each.primitive.name for each in found]
  return names, [each for each in found if each.primitive.name == "reduce_sum"]


# Rounding of large contexts, or of scores near a kink, changes gradients.
ILL_CONDITIONED = ("own normalizer", "softpick dropout", "sparsemax")


@sampled("name", [*filterfalse(ILL_CONDITIONED.count, CASES)], default=[])
def test_float16_tokens(name):
  tokens, arguments = arrays(*SHAPES, dtype=jnp.float16), CASES[name]()
  got = results(tokens, INTERPRETED, arguments)
  wide = [each.astype(jnp.float32) for each in tokens]
  close(got, results(wide, "reference", arguments), 5e-3)


@sampled("name", ["dot", "additive", "causal", "general"], default=[])
def test_bfloat16_is_as_exact_as_the_reference(name):
  arguments = CASES[name]()
  exact = results(arrays(*SHAPES), "reference", arguments)
  tokens = arrays(*SHAPES, dtype=jnp.bfloat16)

  def error(implementation):
    computed = results(tokens, implementation, arguments)
    return [
      float(np.linalg.norm(np.asarray(got, np.float32) - want))
      for got, want in zip(jax.tree.leaves(computed), jax.tree.leaves(exact))
    ]

  for kernel, dense in zip(error(INTERPRETED), error("reference")):
    assert kernel <= 1.5 * dense + 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  "shapes",
  [
    ((2, 2, 3, 140, 8), (2, 2, 1, 130, 8), (2, 2, 1, 130, 4)),
    ((140, 8), (2, 130, 8), (3, 1, 130, 4)),
    ((2, 1, 140, 8), (1, 3, 130, 8), (130, 4)),
    ((1, 8), (300, 8), (300, 4)),
    ((2, 3, 140, 8), (2, 1, 300, 8), (2, 3, 300, 4)),
    ((2, 3, 140, 8), (2, 3, 130, 8), (2, 1, 130, 4)),
    ((2, 3, 140, 8), (1, 1, 130, 8), (2, 1, 130, 4)),
  ],
  ids=[
    *("grouped", "ranks", "broadcast", "one query"),
    *("grouped keys", "grouped values", "shared keys, grouped values"),
  ],
)
# The mask hides the last tiles of keys from all queries.
@pytest.mark.parametrize("mask", [None, masks.causal(-20)])
def test_leading_axes_broadcast_without_repeating_keys(shapes, mask):
  tokens = arrays(*shapes)
  got = results(tokens, INTERPRETED, {"mask": mask})
  close(got, results(tokens, "reference", {"mask": mask}), 1e-4)


@sampled("name", ["softmax", "entmax"], default=["entmax"])
def test_forward_mode_and_second_order_equal_the_reference(name):
  normalizer = getattr(normalizers, name)()
  tokens = arrays((2, 130, 4), (2, 140, 4), (2, 140, 3))
  moved = arrays((2, 130, 4), (2, 140, 4), (2, 140, 3), seed=3)

  @functools.partial(jax.jit, static_argnums=0)
  def derivatives(implementation, *tokens):
    def loss(*tokens):
      context = attend(
        *tokens,
        mask=masks.causal(),
        normalizer=normalizer,
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(context))

    def gradient(*tokens):
      return jax.grad(loss, (0, 1, 2))(*tokens)

    def inner(*tokens):
      products = map(jnp.vdot, gradient(*tokens), moved)
      return sum(products)

    return (
      jax.jvp(loss, tokens, tuple(moved)),
      jax.jvp(gradient, tokens, tuple(moved))[1],
      jax.grad(inner, (0, 1, 2))(*tokens),
    )

  got = derivatives(INTERPRETED, *tokens)
  close(got, derivatives("reference", *tokens), 1e-4)


@pytest.mark.exhaustive
def test_vmap_equals_a_leading_axis():
  tokens = arrays((3, 130, 4), (3, 140, 4), (3, 140, 3))

  def gradient(*tokens):
    def loss(*tokens):
      return jnp.sum(jnp.sin(attend(*tokens, implementation=INTERPRETED)))

    return jax.grad(loss, (0, 1, 2))(*tokens)

  close(jax.jit(jax.vmap(gradient))(*tokens), jax.jit(gradient)(*tokens), 1e-5)


@sampled(
  "name", ["Shaw", "additive", "positional", "Transformer-XL"], default=["Shaw"]
)
def test_shards_of_a_mesh_equal_the_whole(name):
  """With parameters that all devices share, and lengths of one axis."""
  query, key, value = arrays((4, 6, 130, 8), (4, 6, 130, 8), (4, 6, 130, 4))
  score = CASES[name]()["score"]
  lengths = jnp.array([100, 0, 130, 5])
  mesh = make_mesh(batch=2, head=2)
  tokens, batch = P("batch", "head"), P("batch")

  def gradients(implementation, tokens, score, lengths):
    def loss(tokens, score):
      context = attend(
        *tokens,
        score=score,
        mask=masks.padding(lengths),
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(context))

    return jax.grad(loss, (0, 1))(tokens, score)

  specs = (tokens,) * 3, P()
  of_shards = jax.shard_map(
    lambda *arguments: gradients(INTERPRETED, *arguments),
    mesh=mesh,
    in_specs=(*specs, batch),
    out_specs=specs,
  )
  arguments = (query, key, value), score, lengths
  want = jax.jit(gradients, static_argnums=0)("reference", *arguments)
  close(jax.jit(of_shards)(*arguments), want, 1e-4)


def test_batches_of_gradients_are_lowered_for_a_tpu():
  def gradient(*tokens):
    def loss(*tokens):
      context = attend(
        *tokens, mask=masks.causal(), implementation=Pallas(target="tpu")
      )
      return jnp.sum(context)

    return jax.grad(loss, (0, 1, 2))(*tokens)

  tokens = [jax.ShapeDtypeStruct((3, 2, 256, 64), jnp.float32)] * 3
  traced = jax.jit(jax.vmap(gradient)).trace(*tokens)
  program = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert program.count("@tpu_custom_call") == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  "name",
  [
    *("causal", "padding", "general", "additive", "cosine", "closure"),
    *("Shaw", "disentangled", "location", "forgetting", "T5 later"),
    *("softpick causal", "sigmoid", "dropout", "predicted"),
    *("entmax", "sparsemax"),
  ],
)
def test_no_races_and_no_uninitialised_memory(name, capfd):
  checked = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
  )
  tokens = arrays((2, 130, 8), (2, 150, 8), (2, 150, 4))
  arguments = {**CASES[name]()}
  kernels = Pallas(interpret=checked, query_block=128, key_block=128)
  got = results(tokens, kernels, arguments)
  close(got, results(tokens, "reference", arguments), 1e-4)
  # The interpreter prints the races that it finds.
  assert "RACE" not in capfd.readouterr().out


def test_scores_of_whole_rows_have_to_fit_into_memory():
  def trace(length, mask=None):
    def context(*tokens):
      options = {"mask": mask, "normalizer": normalizers.sparsemax()}
      return attend(*tokens, **options, implementation=INTERPRETED)

    jax.eval_shape(
      context, *[jax.ShapeDtypeStruct((length, 1), jnp.float32)] * 3
    )

  trace(65536)
  trace(65537, masks.sliding_window(1000, 0))
  with pytest.raises(NotImplementedError, match="at most 65536 visible keys"):
    trace(65537)


def test_what_kernels_do_not_support_is_an_error_that_says_why():
  query, key, value = arrays((2, 5, 4), (2, 7, 4), (2, 7, 3))

  def refused(reason, implementation=INTERPRETED, **arguments):
    with pytest.raises(NotImplementedError, match=reason):
      attend(query, key, value, implementation=implementation, **arguments)

  refused("needs a TPU or a Hopper GPU, the platform is cpu", "pallas")
  half = jnp.ones((5, 4), jnp.float16)
  with pytest.raises(NotImplementedError, match="no float16 on TPUs"):
    attend(half, half, half, implementation=Pallas(target="tpu"))
  stick_breaking = normalizers.stick_breaking()
  refused("elementwise .*, got StickBreaking", normalizer=stick_breaking)
  own = normalizers.FunctionNormalizer(jax.nn.softmax)
  refused("elementwise .*, got FunctionNormalizer", normalizer=own)
  refused("the operation erf_inv", normalizer=Inverse())
  table = jnp.ones(7)
  refused(
    "the operation gather",
    score=scores.positional(lambda q, k, i, j: q @ k.mT + table[j - i]),
  )
  bias = biases.relative_position(jnp.zeros((8, 2)))
  refused(
    "biases by distance at given positions",
    bias=bias.at(jnp.arange(5), jnp.arange(7)),
  )
  forgetting = scores.forgetting(scores.dot(), jnp.zeros(9))
  refused("arrays by position that are shifted", score=forgetting.shifted(2))
  refused(
    "a rule of jax.custom_vjp", score=lambda q, k: straight_through(q @ k.mT)
  )
  weight = jnp.ones((2, 1, 1))
  refused("a score of one head", score=lambda q, k: weight * (q @ k.mT))


def test_blocks_are_multiples_of_128():
  with pytest.raises(ValueError, match="key_block must be a multiple of 128"):
    Pallas(key_block=64)


def test_an_unknown_target_is_an_error():
  with pytest.raises(ValueError, match="target must be 'tpu', 'hopper'"):
    Pallas(target="H100")
  with pytest.raises(ValueError, match="no public interpreter"):
    Pallas(target="hopper", interpret=True)


def test_tiles_of_gpus_have_fixed_sizes():
  kernels = Pallas(target="hopper", query_block=128)
  with pytest.raises(NotImplementedError, match="query_block and key_block"):
    attend(*arrays((64, 64), (64, 64), (64, 64)), implementation=kernels)


@jax.jit
def sign(numbers):
  return jnp.where(numbers >= 0.0, 1.0, -1.0)


@jax.custom_jvp
def weighted_tanh_sum(query, key, weight):
  return weight * (query @ key.mT)


weighted_tanh_sum.defjvps(
  lambda tangent, _, query, key, weight: weight * (tangent @ key.mT), None, None
)


@pytest.mark.parametrize(
  "score",
  [
    lambda q, k: sign(jnp.round(q @ k.mT)),  # of zeros too
    lambda q, k: weighted_tanh_sum(q, k, 2.0),
  ],
  ids=["sign", "weighted_tanh_sum"],
)
def test_functions_with_the_names_of_operations_of_kernels(score):
  tokens = arrays((150, 8), (200, 8), (200, 4))
  own, expected = of_both(functools.partial(attend, score=score), *tokens)
  np.testing.assert_allclose(own, expected, atol=1e-5)


@jax.custom_jvp
def halved(numbers):
  """The identity, with half of its derivative."""
  return numbers


halved.defjvp(lambda primals, tangents: (*primals, 0.5 * tangents[0]))


@jax.custom_vjp
def straight_through(numbers):
  return jnp.round(numbers)


straight_through.defvjp(
  lambda numbers: (jnp.round(numbers), None), lambda _, cotangent: (cotangent,)
)


WITH_RULES = {
  "relu": lambda q, k: jax.nn.relu(q @ k.mT),
  "softplus": lambda q, k: jax.nn.softplus(q @ k.mT),
  "function": lambda q, k: halved(q @ k.mT) + halved(2.0 * q @ k.mT),
  "wrapper of relu": scores.modified(
    scores.as_score(lambda q, k: jax.nn.relu(q @ k.mT)),
    lambda s, i, j: halved(s),
  ),
}


@sampled("name", WITH_RULES, default=["wrapper of relu"])
def test_functions_with_a_derivative_rule_of_their_own(name):
  query, key, value = arrays((60, 8), (70, 8), (70, 4))
  # Products that are 0, where a maximum has another derivative than relu.
  query, key = query.at[:9, 4:].set(0.0), key.at[:9, :4].set(0.0)
  tokens = query, key, value
  arguments = {"score": scores.as_score(WITH_RULES[name])}
  got = results(tokens, INTERPRETED, arguments)
  close(got, results(tokens, "reference", arguments), 1e-4)


def test_a_name_stands_for_compiled_kernels():
  assert BY_NAME["pallas"] == Pallas()
  assert not Pallas().interpret


@pytest.mark.parametrize(
  ("kernels", "platform"),
  [
    (Pallas(target="tpu"), "tpu"),
    (Pallas(target="hopper"), "cuda"),
    (Pallas(interpret=True), jax.default_backend()),
  ],
)
def test_derivatives_by_xla_have_tiles_for_the_platform_of_the_kernels(
  kernels, platform, monkeypatch
):
  found = []

  def make_rule(request, tokens):
    found.append(request.target)
    return blockwise_rule.make_rule(request, tokens)

  monkeypatch.setattr(call, "make_rule", make_rule)
  tokens = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
  run = functools.partial(attend, implementation=kernels)
  jax.eval_shape(run, tokens, tokens, tokens)
  assert found == [platform]
