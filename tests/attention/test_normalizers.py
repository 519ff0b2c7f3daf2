"""Normalizers: values, derivatives of every order, and the rules of masks.

The formulas here are written from the papers: sorted thresholds for entmax, a
loop for stick-breaking. They share no code with `attention.normalizers`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import (
  biases,
  masks,
  merge,
  multi_head_attention,
  normalizers,
  ring_attention,
  scores,
)
from attention.implementations import Pallas
from attention.implementations.blockwise import Blockwise
from attention.modules import NORMALIZER_NAMES, Attention, MultiHeadAttention
from tests.attention.comparison import close, jitted
from tests.matrix import sampled, sampled_product
from tests.meshes import make_mesh

attend = jitted(attention.attend)
attention_weights = jitted(attention.attention_weights)
TILES = Blockwise(query_block=4, key_block=4)
HEADS, T, S, D, E = 3, 13, 17, 8, 5
SINK = np.array([0.0, 1.0, -2.0])


def with_sink(scores):
  exponentials = jnp.exp(scores)
  sink = jnp.exp(jnp.asarray(SINK, scores.dtype))[:, None, None]
  return exponentials / (exponentials.sum(-1, keepdims=True) + sink)


def softpick(scores):
  terms = jnp.exp(scores) - 1.0
  terms = jnp.where(jnp.isneginf(scores), 0.0, terms)
  return jax.nn.relu(terms) / jnp.abs(terms).sum(-1, keepdims=True)


def signed(scores):
  visible = ~jnp.isneginf(scores)
  size = jnp.where(visible, jnp.exp(jnp.abs(scores)), 0.0)
  return jnp.sign(scores) * size / size.sum(-1, keepdims=True)


def _sorted_sums(scores):
  """Scores from the largest on, their running means and numbers."""
  ordered = -jnp.sort(-scores, axis=-1)
  numbers = jnp.arange(1.0, scores.shape[-1] + 1.0, dtype=scores.dtype)
  finite = jnp.where(jnp.isneginf(ordered), 0.0, ordered)
  numbers = jnp.broadcast_to(numbers, scores.shape)
  return ordered, finite, numbers


def _chosen(thresholds, ordered):
  """The threshold of the largest support whose entries exceed it."""
  count = jnp.sum(ordered > thresholds, axis=-1, keepdims=True)
  return jnp.take_along_axis(thresholds, count - 1, axis=-1)


def sparsemax(scores):
  ordered, finite, numbers = _sorted_sums(scores)
  thresholds = (jnp.cumsum(finite, axis=-1) - 1.0) / numbers
  return jnp.maximum(scores - _chosen(thresholds, ordered), 0.0)


def entmax15(scores):
  """Peters et al., 2019, algorithm 2."""
  scores = scores / 2.0
  ordered, finite, numbers = _sorted_sums(scores)
  mean = jnp.cumsum(finite, axis=-1) / numbers
  squares = jnp.cumsum(finite**2, axis=-1) / numbers
  inside = (1.0 - numbers * (squares - mean**2)) / numbers
  thresholds = mean - jnp.sqrt(jnp.where(inside > 0.0, inside, 1.0))
  thresholds = jnp.where(inside > 0.0, thresholds, jnp.inf)
  return jnp.maximum(scores - _chosen(thresholds, ordered), 0.0) ** 2


def stick_breaking(scores):
  rest = jnp.ones(scores.shape[:-1], scores.dtype)
  weights = []
  for column in range(scores.shape[-1] - 1, -1, -1):
    share = jax.nn.sigmoid(scores[..., column])
    weights.append(share * rest)
    rest = rest * (1.0 - share)
  return jnp.stack(weights[::-1], axis=-1)


# Name: the normalizer and its formula. Scores are -inf where hidden.
CASES = {
  "sink": (normalizers.softmax(SINK), with_sink),
  "sigmoid": (
    normalizers.sigmoid(SINK),
    lambda scores: 1.0 / (1.0 + jnp.exp(-scores - SINK[:, None, None])),
  ),
  "softpick": (normalizers.softpick(0.0), softpick),
  "signed": (normalizers.signed_softmax(), signed),
  "entmax15": (normalizers.entmax(), entmax15),
  "sparsemax": (normalizers.sparsemax(), sparsemax),
  "stick_breaking": (normalizers.stick_breaking(), stick_breaking),
  "function": (
    lambda scores: jax.nn.softmax(scores, axis=-1) ** 2,
    lambda scores: (
      jnp.exp(2.0 * scores) / jnp.exp(scores).sum(-1, keepdims=True) ** 2
    ),
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_with_nan_is_nan(name):
  normalizer = normalizers.as_normalizer(CASES[name][0])
  scores = np.zeros((HEADS, 2, 300), np.float32)
  scores[:, 0, 7] = np.nan
  is_nan = np.isnan(jitted(normalizer)(scores)).any(-1)
  np.testing.assert_array_equal(is_nan, [[True, False]] * HEADS)


def draw(dtype="f8"):
  generator = np.random.default_rng(0)
  shapes = (HEADS, T, D), (HEADS, S, D), (HEADS, S, E)
  return [generator.normal(size=shape).astype(dtype) for shape in shapes]


def dense(formula, mask):
  """Attention by a formula; rows that may attend to nothing are zero."""

  def context(query, key, value):
    scores = query @ jnp.swapaxes(key, -1, -2) / D**0.5
    visible = jnp.ones((T, S), bool)
    if mask is not None:
      visible = mask.materialize(T, S)
    some = visible.any(-1)[:, None]
    hidden = jnp.where(some, -jnp.inf, 0.0)
    weights = formula(jnp.where(visible[None], scores, hidden[None]))
    return jnp.where(visible[None], weights, 0.0) @ value

  return context


def loss(context, with_context=False):
  def total(*tokens):
    found = context(*tokens)
    summed = jnp.sum(jnp.sin(found * np.arange(E)[None, None]))
    return (summed, found) if with_context else summed

  return total


@sampled("name", CASES, default=["entmax15"])
def test_values_and_derivatives_equal_the_formula(name):
  # The first rows see nothing, and later rows see different numbers of keys.
  normalizer, formula = CASES[name]
  mask = masks.causal(-2)

  def both(context, query, key, value):
    gradient = jax.grad(loss(context, True), (0, 1, 2), has_aux=True)
    tokens, tangents = (query, key, value), (query, key * key, value)
    return jax.jvp(gradient, tokens, tangents)

  with jax.enable_x64(True):
    tiles = functools.partial(
      attend, normalizer=normalizer, mask=mask, implementation=TILES
    )
    results = jax.jit(functools.partial(both, tiles))(*draw())
    expected = jax.jit(functools.partial(both, dense(formula, mask)))(*draw())
  for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected)):
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_float32_weights_equal_the_formula(name):
  normalizer, formula = CASES[name]
  query, key, _ = draw("f4")
  weights = jax.jit(
    functools.partial(attention_weights, normalizer=normalizer)
  )(query, key)
  table = query.astype("f8") @ np.swapaxes(key, -1, -2) / D**0.5
  with jax.enable_x64(True):
    expected = jax.jit(formula)(jnp.asarray(table))
  np.testing.assert_allclose(weights, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_reference_has_the_derivatives_of_tiles(name):
  normalizer, _ = CASES[name]
  with jax.enable_x64(True):
    gradients = []
    for implementation in ("reference", TILES):
      attention = functools.partial(
        attend,
        normalizer=normalizer,
        mask=masks.sliding_window(3, 2),
        bias=biases.alibi(HEADS),
        dropout_rate=0.3,
        rng=jax.random.key(0),
        implementation=implementation,
      )
      gradients.append(jax.grad(loss(attention), (0, 1, 2))(*draw()))
  for ours, theirs in zip(*gradients):
    np.testing.assert_allclose(ours, theirs, atol=1e-10)


@pytest.mark.parametrize("implementation", ["reference", TILES])
def test_hidden_keys_change_nothing(implementation):
  query, key, value = draw("f4")
  mask = masks.padding(jnp.asarray([0, 5, S]))
  bad = np.arange(S)[None] >= np.array([0, 5, S])[:, None]

  @jax.jit
  def run(fill, query, value):
    filled = jnp.where(bad[..., None], fill, key)

    def attention(query, value):
      return attend(
        query,
        filled,
        jnp.where(bad[..., None], fill, value),
        mask=mask,
        normalizer=normalizers.entmax(),
        implementation=implementation,
      )

    gradient = jax.grad(loss(attention, True), (0, 1), has_aux=True)
    return gradient(query, value)

  gradients = []
  for fill in (0.0, np.nan):
    gradient, context = run(fill, query, value)
    gradients.append(gradient)
    assert not context[0].any()
  for zero, nan in zip(*gradients):
    np.testing.assert_array_equal(zero, nan)
    assert not zero[0].any()


@sampled("alpha", [1.1, 1.3, 1.5, 1.9], default=[1.3])
def test_entmax_solves_its_equation(alpha):
  rows = np.random.default_rng(1).normal(size=(50, 200)).astype("f4") * 4.0
  weights = check_equation(alpha, rows)
  assert (weights == 0.0).any()


@pytest.mark.parametrize("alpha", [1.01, 2.0])
def test_entmax_of_long_rows_whose_last_score_is_the_largest(alpha):
  """Rows that are no multiple of a group: the last keys are in none."""
  rows = np.random.default_rng(0).normal(size=(20, 300)).astype("f4")
  rows[:10, -1] = 50.0
  check_equation(alpha, rows)


def check_equation(alpha, rows):
  """Returns the weights of entmax, which solve its equation."""
  weights = np.asarray(jitted(normalizers.entmax(alpha))(rows), "f8")
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=2e-6)
  # (alpha - 1) score - weight^(alpha - 1) is the threshold on the support.
  thresholds = (alpha - 1) * rows - weights ** (alpha - 1)
  for row, support in zip(thresholds, weights > 1e-3):
    np.testing.assert_allclose(row[support], row[support][0], atol=1e-4)
  return weights


def test_sink_of_zero_is_softmax_off_by_one():
  table = np.float32([[1.0, -2.0, 0.5]])
  weights = jitted(normalizers.softmax(sink=0.0))(table)
  expected = np.exp(table) / (1.0 + np.exp(table).sum())
  np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_a_sink_belongs_to_one_part_of_merged_attention():
  sink = normalizers.softmax(SINK.astype("f4"))

  @jax.jit
  def run(query, key, value):
    whole = attend(query, key, value, normalizer=sink)
    first = attend(
      query, key[:, :5], value[:, :5], normalizer=sink, return_lse=True
    )
    second = attend(query, key[:, 5:], value[:, 5:], return_lse=True)
    return merge(*zip(first, second))[0], whole

  merged, whole = run(*draw("f4"))
  np.testing.assert_allclose(merged, whole, atol=1e-6)


@pytest.mark.parametrize("name", ["sink", "sigmoid", "function"])
def test_grouped_heads_have_their_own_parameters(name):
  """H = 4 queries' heads and K = 2; the normalizer has a parameter per head."""
  generator = np.random.default_rng(0)
  own = jnp.asarray(generator.normal(size=4), jnp.float32)
  normalizer = {
    "sink": normalizers.softmax(own),
    "sigmoid": normalizers.sigmoid(own),
    "function": lambda scores: jax.nn.sigmoid(
      scores * own[None, :, None, None]
    ),
  }[name]
  tokens = generator.normal(size=(2, 5, 8)).astype("f4")
  query, output = (generator.normal(size=(8, 4, 8)) for _ in range(2))
  key, value = (generator.normal(size=(8, 2, 8)) for _ in range(2))
  weights = [w.astype("f4") for w in (query, key, value)]
  repeated = [weights[0], *(np.repeat(w, 2, axis=1) for w in weights[1:])]
  output = np.swapaxes(output, 0, 1).astype("f4")

  @jax.jit
  def run(tokens, *weights):
    return multi_head_attention(
      *[tokens] * 3, *weights, output, normalizer=normalizer
    )

  ours, theirs = (run(tokens, *each) for each in (weights, repeated))
  np.testing.assert_allclose(ours, theirs, atol=1e-4)


@sampled(
  ("name", "implementation"),
  [
    ("sigmoid", None),
    ("sink", None),
    ("sigmoid", Pallas(interpret=True)),
    ("sink", Pallas(interpret=True)),
  ],
  default=[("sigmoid", None)],
)
def test_ring_equals_one_device(name, implementation):
  normalizer = CASES[name][0]
  query, key, value = (
    np.random.default_rng(0).normal(size=(HEADS, 16, 8)).astype("f4")
    for _ in range(3)
  )
  mesh = make_mesh(sequence=4)
  shard = jax.P(None, "sequence")
  ring = jax.shard_map(
    functools.partial(
      ring_attention,
      axis_name="sequence",
      mask=masks.causal(),
      normalizer=normalizer,
      implementation=implementation,
    ),
    mesh=mesh,
    in_specs=shard,
    out_specs=shard,
  )
  one = functools.partial(attend, mask=masks.causal(), normalizer=normalizer)
  tokens = query, key, value

  def both(attention):
    total = jax.grad(lambda *tokens: jnp.sum(attention(*tokens)))
    return jax.jit(lambda *tokens: (attention(*tokens), total(*tokens)))(
      *tokens
    )

  close(both(ring), both(one), rtol=1e-7, atol=1e-5)


def test_only_softmax_has_an_lse():
  with pytest.raises(NotImplementedError, match="only softmax has a log-sum"):
    attend(*draw("f4"), normalizer=normalizers.entmax(), return_lse=True)


def test_a_ring_refuses_normalizers_of_whole_rows():
  mesh = make_mesh(sequence=2)
  ring = jax.shard_map(
    functools.partial(
      ring_attention, axis_name="sequence", normalizer=normalizers.softpick()
    ),
    mesh=mesh,
    in_specs=jax.P(None, "sequence"),
    out_specs=jax.P(None, "sequence"),
  )
  tokens = jnp.ones((1, 4, 2))
  with pytest.raises(NotImplementedError, match="cannot merge the results"):
    ring(tokens, tokens, tokens)


@pytest.mark.parametrize("normalizer", [normalizers.entmax, "entmax", 2.0])
def test_other_types_are_refused(normalizer):
  with pytest.raises(TypeError, match="normalizer must be an instance of"):
    attend(*draw("f4"), normalizer=normalizer)


@pytest.mark.parametrize(
  "function",
  [
    functools.partial(jax.nn.softmax, axis=-2),
    lambda scores: jax.nn.softmax(jnp.cumsum(scores, axis=-2)),
    lambda scores: scores * jnp.arange(scores.shape[-2])[:, None],
    lambda scores: scores * jnp.ones((T, 1)),
  ],
)
def test_a_function_of_several_rows_is_refused(function):
  tokens = jnp.ones((T, D))
  with pytest.raises(ValueError, match=r"normalizer must .* each row"):
    attend(tokens, tokens, tokens, normalizer=function)
  with pytest.raises(ValueError, match=r"normalizer must .* each row"):
    attention_weights(tokens, tokens, normalizer=function)


@pytest.mark.parametrize(
  "function",
  [
    jax.vmap(jax.vmap(jax.nn.softmax)),
    lambda scores: jnp.where(
      scores >= jax.lax.top_k(scores, 2)[0][..., -1:], scores, 0.0
    ),
    lambda scores: jnp.sort(scores) / jnp.abs(scores).sum(-1, keepdims=True),
  ],
)
def test_a_function_of_each_row_is_accepted(function):
  tokens = draw("f4")[0][:2]
  contexts = [
    attend(tokens, tokens, tokens, normalizer=function, implementation=each)
    for each in ("reference", TILES)
  ]
  close(*contexts, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  "function",
  [
    lambda scores: scores * scores.shape[-3],
    lambda scores: scores * jnp.arange(scores.shape[-3])[:, None, None],
    functools.partial(jax.nn.softmax, axis=-3),
  ],
)
def test_blocks_of_a_function_that_reads_heads_have_all_heads(function):
  tokens = draw("f4")[0]
  one_head = Blockwise(query_block=4, key_block=4, leading_block=1)
  contexts = [
    attend(tokens, tokens, tokens, normalizer=function, implementation=each)
    for each in ("reference", one_head)
  ]
  close(*contexts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", TILES])
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_a_result_of_another_shape_is_refused(implementation, mask):
  arguments = {"implementation": implementation, "mask": mask}
  for bad, shown in (
    (lambda scores: scores.sum(-1), r"it returned \(3, \d+\)"),
    (lambda scores: (scores, scores), "it returned tuple"),
  ):
    expected = rf"normalizer must return .* shape \(3, \d+, \d+\), {shown}"
    with pytest.raises(ValueError, match=expected):
      attend(*draw("f4"), normalizer=bad, **arguments)


@pytest.mark.parametrize("changed", ["weights", "terms"])
@pytest.mark.parametrize("name", ["softpick", "softmax"])
def test_a_subclass_that_changes_the_weights_changes_them_in_tiles(
  name, changed
):
  original = getattr(normalizers, name)

  class Weights(original):
    def __call__(self, scores):
      return 0.5 * super().__call__(scores)

  class Terms(original):
    def terms(self, scores, maximum):
      numerators, parts = super().terms(scores, maximum)
      return 0.5 * numerators, parts

  own = {"weights": Weights, "terms": Terms}[changed]()
  tokens = draw("f4")
  want = 0.5 * attend(*tokens, normalizer=original())
  for implementation in ("reference", TILES):
    got = attend(*tokens, normalizer=own, implementation=implementation)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class HyperbolicCosine(normalizers.OnlineNormalizer):
  """cosh(s_j) / sum_k cosh(s_k), infinite at -inf before the `where`."""

  def exponents(self, scores):
    return jnp.where(jnp.isneginf(scores), -jnp.inf, jnp.abs(scores))

  def terms(self, scores, maximum):
    parts = jnp.exp(scores - maximum) + jnp.exp(-scores - maximum)
    parts = jnp.where(jnp.isneginf(scores), 0.0, parts)
    return parts, parts


def test_terms_may_have_infinite_derivatives_at_hidden_scores():
  query, key, value = draw("f4")
  bias = jnp.where(jnp.arange(S) < S - 2, 0.0, -jnp.inf)[None]

  def gradients(implementation):
    def loss(query, key):
      context = attend(
        *(query, key, value),
        bias=bias,
        normalizer=HyperbolicCosine(),
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(context))

    return jax.jit(jax.grad(loss, (0, 1)))(query, key)

  close(gradients(TILES), gradients("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", TILES])
def test_scores_of_minus_infinity_have_no_derivatives(implementation):
  """Also if a function of scores has infinite derivatives there."""
  query, key, value = draw("f4")
  band = masks.sliding_window(1, 1)

  def squares(scores):
    return jnp.where(jnp.isneginf(scores), 0.0, jnp.square(scores))

  def gradient(score, mask):
    def loss(bias):
      context = attend(
        *(query, key, value),
        score=score,
        mask=mask,
        bias=bias,
        normalizer=squares,
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(context))

    return jax.jit(jax.grad(loss))(jnp.ones(S))

  got = gradient(scores.local(scores.dot(), 1), None)
  close(got, gradient(scores.dot(), band), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", TILES])
@pytest.mark.parametrize("name", CASES)
def test_without_keys_the_context_is_zero(name, implementation):
  query, key, value = draw("f4")
  context = attend(
    *(query, key[..., :0, :], value[..., :0, :]),
    normalizer=CASES[name][0],
    implementation=implementation,
  )
  np.testing.assert_array_equal(context, np.zeros((*query.shape[:-1], E)))


@pytest.mark.parametrize("name", CASES)
def test_long_rows_may_be_absent(name):
  shape = (0, HEADS, T, 300)
  weights = jax.eval_shape(CASES[name][0], jnp.zeros(shape))
  assert weights.shape == shape


def test_entmax_of_bfloat16_ends_and_sums_to_1():
  # In bfloat16, rounding keeps the steps of Newton's method above a tolerance.
  scores = 0.1 * np.random.default_rng(0).normal(size=(4, 4111))
  scores = jnp.asarray(scores, jnp.bfloat16)
  weights = np.float32(jitted(normalizers.entmax(1.0005))(scores))
  np.testing.assert_allclose(np.sum(weights, axis=-1), 1.0, rtol=2e-3)


def test_the_derivative_of_softpick_at_zero_and_at_hidden_keys():
  """Those of relu and of the absolute value, as JAX defines them at 0."""
  scores = jnp.array([[0.0, 1.0, -1.0, -jnp.inf]])
  derivative, want = (
    np.asarray(jax.jit(jax.jacobian(each))(scores))[0, :, 0]
    for each in (normalizers.softpick(0.0), softpick)
  )
  np.testing.assert_allclose(derivative[:, :3], want[:, :3], atol=1e-6)
  assert not np.any(derivative[:, 3])


def test_the_derivative_of_softpick_where_its_two_forms_meet():
  @jax.jit
  @jax.vmap
  @jax.grad
  def derivative(score):
    return normalizers.softpick()(jnp.stack([score, 1.0])[None])[0, 0]

  at = derivative(jnp.array([0.0199, 0.02, 0.0201]))
  np.testing.assert_allclose(at, at[0], rtol=1e-3)


@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_a_fraction_of_other_shapes_is_refused(mask):
  class Kept(normalizers.Normalizer):
    def __call__(self, scores):
      return scores

    def fraction(self, scores):
      return scores, scores[..., :1]

  with pytest.raises(ValueError, match=r"Kept.fraction must return .* \(3, \d"):
    attend(*draw("f4"), normalizer=Kept(), mask=mask, implementation=TILES)


@pytest.mark.parametrize("implementation", ["reference", TILES])
def test_softpick_of_scores_that_are_all_zero_is_zero(implementation):
  tokens = np.zeros((5, 2), np.float32)
  context = attend(
    tokens,
    tokens,
    tokens + 1.0,
    normalizer=normalizers.softpick(0.0),
    mask=masks.causal(),
    implementation=implementation,
  )
  np.testing.assert_array_equal(context, np.zeros((5, 2)))


def test_a_function_sees_all_keys_of_a_row_of_tiles():
  """Its result may depend on their number and order, hidden ones included."""
  tokens = [jnp.asarray(each) for each in draw("f4")]

  def falling(scores):
    order = jnp.arange(scores.shape[-1])[None, None] / scores.shape[-1]
    return jax.nn.relu(scores + 2.0) * jnp.exp(-order)

  for mask in (None, masks.causal(), masks.sliding_window(2, 1)):
    contexts = [
      attend(*tokens, normalizer=falling, mask=mask, implementation=each)
      for each in ("reference", TILES)
    ]
    np.testing.assert_allclose(*contexts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softpick", "function"])
def test_a_mask_that_hides_all_pairs_gives_zeros(name):
  for mask in (masks.prefix(0), masks.padding(jnp.zeros(HEADS, int))):
    context = attend(
      *draw("f4"), normalizer=CASES[name][0], mask=mask, implementation=TILES
    )
    np.testing.assert_array_equal(context, np.zeros((HEADS, T, E)))


def test_entmax_near_softmax_of_large_scores_in_partial_tiles():
  # The rows of a kernel's tile that have no query must not overflow.
  query, key = jnp.array([[200.0, 3.0]]), jnp.array([[1.0, 0.0], [0.5, 1.0]])

  def loss(key, value):
    context = attend(
      *(query, key, value),
      score=scores.dot(),
      normalizer=normalizers.entmax(1.01),
      implementation=Pallas(interpret=True),
    )
    return jnp.sum(context)

  gradients = jax.jit(jax.grad(loss, (0, 1)))(key, jnp.ones((2, 1)))
  close(gradients, (np.zeros((2, 2)), np.eye(2)[:, :1]), atol=1e-6)


def test_entmax_near_softmax_keeps_its_digits():
  rows = np.random.default_rng(1).normal(size=(5, 40)).astype("f4") * 4.0
  for alpha in (1.001, 1.01):
    entmax = jitted(normalizers.entmax(alpha))
    weights = entmax(rows)
    with jax.enable_x64(True):
      wide = entmax(rows.astype("f8"))
    np.testing.assert_allclose(weights, wide, atol=2e-6)
    softmax = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    difference = abs(weights - softmax).max()
    assert 0.0 < difference < 40.0 * (alpha - 1.0)


@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_alpha_outside_of_its_range_is_refused(alpha):
  with pytest.raises(ValueError, match=r"alpha must be in \(1, 2\]"):
    normalizers.entmax(alpha)


@sampled("name", NORMALIZER_NAMES, default=["softmax_sink"])
def test_modules_learn_the_parameters_of_a_named_normalizer(name):
  tokens = jnp.asarray(draw("f4")[0])
  module = MultiHeadAttention(4, normalizer=name)
  single = Attention("dot", normalizer=name)

  @jax.jit
  def run(rng):
    variables = module.init(rng, tokens)
    gradients = jax.grad(lambda v: jnp.sum(module.apply(v, tokens) ** 2))(
      variables
    )
    return gradients, single.init_with_output(rng, tokens, tokens)[0]

  gradients, output = run(jax.random.key(0))
  gradients = gradients["params"]
  assert output.shape == tokens.shape
  learned = gradients.get("learned_normalizer", {})
  expected = {"softmax_sink": "sink", "sigmoid": "bias"}.get(name)
  assert list(learned) == ([expected] if expected else [])
  for gradient in learned.values():
    assert gradient.shape == (4,)
    assert gradient.all()


@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-4, 0.02, 0.099, 0.2])
def test_softpick_of_small_scores_has_full_precision(size):
  row = np.random.default_rng(0).normal(size=(3, 50)).astype("f4") * size
  row = row.astype("f4")
  want = np.expm1(row.astype("f8"))
  total = np.abs(want).sum(-1, keepdims=True)

  def first_weights(row):
    weights = normalizers.softpick(0.0)(row)
    return weights[..., 0].sum(), weights

  gradient, weights = jax.jit(jax.grad(first_weights, has_aux=True))(row)
  np.testing.assert_allclose(weights, np.maximum(want, 0.0) / total, rtol=3e-6)
  # Weights depend on the ratios of small scores.
  slope = np.exp(row.astype("f8")) * np.sign(want)
  first = np.maximum(want[:, :1], 0.0)
  expected = -first / total**2 * slope
  expected[:, 0] += ((want > 0) * np.exp(row) / total)[:, 0]
  np.testing.assert_allclose(
    gradient, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
  )


@pytest.mark.parametrize("largest", [1e2, 1e4, 1e6])
def test_stick_breaking_keeps_its_digits_beside_a_large_score(largest):
  row = np.random.default_rng(0).normal(size=(3, 50)) - 3.0
  row[:, 20] = largest
  row = row.astype("f4")
  share = 1.0 / (1.0 + np.exp(-row.astype("f8")))
  rest = np.cumprod(1.0 - share[:, ::-1], axis=-1)[:, ::-1]
  want = share * np.append(rest[:, 1:], np.ones((3, 1)), axis=-1)
  weights = jitted(normalizers.stick_breaking())(row)
  np.testing.assert_allclose(weights, want, rtol=1e-5, atol=1e-7)


# One block of keys or several, the last one not full.
@pytest.mark.parametrize("length", [128, 129, 300])
def test_stick_breaking_of_long_rows(length):
  row, tangent = np.random.default_rng(0).normal(size=(2, 2, length))
  row = row - 3.0
  row[1, length // 2 :] = -np.inf
  with jax.enable_x64(True):
    found = jax.jit(
      lambda row: jax.jvp(normalizers.stick_breaking(), (row,), (tangent,))
    )(jnp.asarray(row))
  share = 1.0 / (1.0 + np.exp(-row))

  def of_later(terms):
    return np.cumsum(terms[:, ::-1], axis=-1)[:, ::-1] - terms

  weights = share * np.exp(of_later(np.log1p(-share)))
  logarithm = (1.0 - share) * tangent - of_later(share * tangent)
  np.testing.assert_allclose(found[0], weights, rtol=1e-12, atol=1e-15)
  np.testing.assert_allclose(
    found[1], weights * logarithm, rtol=1e-12, atol=1e-15
  )


def test_stick_breaking_of_huge_scores_is_finite():
  row = np.full((1, 300), 3e38, np.float32)
  weights = np.asarray(jitted(normalizers.stick_breaking())(row))
  np.testing.assert_array_equal(weights[0, -2:], [0.0, 1.0])
  assert np.isfinite(weights).all()


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match="one of softmax, softmax_sink"):
    Attention("dot", normalizer="entmax2").init(
      jax.random.key(0), jnp.ones((2, 3)), jnp.ones((2, 3))
    )


def _distance(query_positions, key_positions):
  return jnp.abs(query_positions - key_positions).astype(jnp.float32)


def _by_distance(query, key, query_positions, key_positions):
  products = query @ jnp.swapaxes(key, -1, -2)
  return products - 0.1 * _distance(query_positions, key_positions)


def _nearer(pairs, query_positions, key_positions):
  return pairs - 0.1 * _distance(query_positions, key_positions)


# Scores of 64 features and one head.
EYE, ONES = np.eye(64, dtype="f4"), np.ones(64, "f4")
LARGE_SCORES = {
  "dot": scores.dot,
  "scaled_dot": scores.scaled_dot,
  "general": lambda: scores.general(EYE),
  "additive": lambda: scores.additive(EYE, EYE, ONES),
  "concat": lambda: scores.concat(np.concatenate([EYE, EYE]), ONES),
  "cosine": scores.cosine,
  "local": lambda: scores.local(scores.dot(), 200),
  "local_p": lambda: scores.local(scores.dot(), 200, EYE, ONES),
  "shaw": lambda: scores.shaw(jnp.ones((33, 64))),
  "disentangled": lambda: scores.disentangled(EYE, EYE),
  "forgetting": lambda: scores.forgetting(
    scores.scaled_dot(), jnp.zeros((1, 16384))
  ),
  "location": lambda: scores.location(jnp.ones((16384, 64))),
  "transformer_xl": lambda: scores.transformer_xl(EYE, ONES, ONES),
  "soft_cap": lambda: scores.soft_cap(scores.dot(), 50.0),
  "qk_norm": lambda: scores.qk_norm(scores.dot()),
  "temperature": lambda: scores.temperature(scores.dot(), jnp.array(2.0)),
  "modified": lambda: scores.modified(scores.dot(), _nearer),
  "positional": lambda: scores.positional(_by_distance),
}


@sampled_product(
  ("name", "score"),
  (("softmax", *CASES), LARGE_SCORES),
  default=[("entmax15", "scaled_dot")],
)
def test_temporaries_of_the_gradient_are_at_most_64_mib(name, score):
  normalizer, _ = CASES.get(name, (None, None))
  if name in ("sink", "sigmoid"):
    normalizer = type(normalizer)(0.0)  # one head
  if score == "local_p" and name not in ("softmax", "sink"):
    pytest.skip("the Gaussian of local-p multiplies the weights of a softmax")
  score = LARGE_SCORES[score]()
  tokens = [jax.ShapeDtypeStruct((1, 16384, 64), jnp.float32)] * 3
  gradient = jax.grad(
    lambda tokens, score: jnp.sum(
      attend(*tokens, score=score, normalizer=normalizer)
    ),
    (0, 1),
    allow_int=True,
  )
  lowered = jax.jit(gradient).lower(tokens, score)
  memory = lowered.compile().memory_analysis()
  assert memory.temp_size_in_bytes <= 64 * 2**20


def test_any_score_with_any_normalizer():
  generator = np.random.default_rng(0)
  weights = [generator.normal(size=shape) for shape in ((D, 6), (D, 6), (6,))]
  with jax.enable_x64(True):
    score = scores.additive(*map(jnp.asarray, weights))
    query, key, value = map(jnp.asarray, draw())

    @jax.jit
    def both(query, key, value):
      context = attend(
        query,
        key,
        value,
        score=score,
        normalizer=normalizers.sparsemax(),
        implementation=TILES,
      )
      return context, sparsemax(score(query, key)) @ value

    context, expected = both(query, key, value)
  np.testing.assert_allclose(context, expected, atol=1e-9)
