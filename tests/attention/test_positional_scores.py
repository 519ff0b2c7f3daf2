"""Scores that read positions: values, derivatives, positions of every tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks, modules, normalizers, scores
from attention.implementations.blockwise import Blockwise
from attention.multi_head import grouped_query
from attention.scores import distances, look_up, skew
from tests.attention.comparison import close, jitted, wide
from tests.attention.oracle import draw, loop_attend, single
from tests.attention.positional_cases import (
  CASES,
  FEATURES,
  as_arrays,
  draw_case,
  loop,
)
from tests.attention.test_ring import alone, around, check
from tests.matrix import sampled
from tests.meshes import make_mesh

attend = jitted(attention.attend)
attend_heads = jitted(grouped_query.attend_heads)
attention_weights = jitted(attention.attention_weights)
TILES = Blockwise(query_block=4, key_block=3, leading_block=1)
SHAPES = (2, 11, FEATURES), (2, 13, FEATURES), (2, 13, 5)
every_name = pytest.mark.parametrize("name", CASES)


def result(name, implementation, **options):
  """(parameters, *tokens) -> the context and the lse of a case."""

  def run(parameters, query, key, value):
    return attend(
      query,
      key,
      value,
      score=CASES[name].bound(parameters),
      implementation=implementation,
      return_lse=True,
      **options,
    )

  return run


def loss(name, implementation):
  run = result(name, implementation, mask=masks.causal(5))

  def total(*arguments):
    context, lse = run(*arguments)
    return jnp.sum(jnp.sin(context)) + jnp.sum(jnp.where(lse > -9e9, lse, 0.0))

  return total


def expected_weights(name, table, parameters, query, key, visible=True):
  """The weights of a table of scores; those of local-p keep the Gaussian."""
  del parameters
  weights = loop_attend(table, np.zeros((*key.shape[:-1], 1)), visible)[2]
  if "local_p" not in name:
    return weights
  # The paper: softmax over the window, times the Gaussian.
  dots = np.where(np.isneginf(table), -np.inf, query @ key.swapaxes(-1, -2))
  weights = loop_attend(dots, np.zeros((*key.shape[:-1], 1)), visible)[2]
  inside = ~np.isneginf(table)
  gaussian = np.exp(np.where(inside, table - np.where(inside, dots, 0.0), 0.0))
  return weights * gaussian


@every_name
def test_weights_equal_a_numpy_loop(name):
  query, key, _ = draw(0, *SHAPES)
  parameters = draw_case(name)
  table = loop(name, parameters, query, key)
  with wide():
    score = CASES[name].bound(as_arrays(parameters))

    @jax.jit
    def both(query, key):
      return score(query, key), attention_weights(query, key, score=score)

    got, weights = both(query, key)
  close(got, table, rtol=1e-09, atol=1e-11)
  want = expected_weights(name, table, parameters, query, key)
  close(weights, want, rtol=1e-09, atol=1e-11)


def shaw_of_code(parameters, query, key):
  """tensor2tensor: a matrix of clipped distances, and a look-up for each."""
  table = parameters["relative_keys"]
  most = len(table) // 2
  distances = np.arange(len(key))[None] - np.arange(len(query))[:, None]
  relative = table[np.clip(distances, -most, most) + most]
  products = query @ key.T + np.einsum("td,tsd->ts", query, relative)
  return products / np.sqrt(query.shape[-1])


def transformer_xl_of_code(parameters, query, key):
  """The shift: distances from large to small, then rows moved by reshaping."""
  weight, count = parameters["weight"], len(key)
  angles = np.outer(
    np.arange(count - 1, -1, -1.0),
    1.0 / 10000.0 ** (np.arange(0, len(weight), 2) / len(weight)),
  )
  relative = np.concatenate([np.sin(angles), np.cos(angles)], -1) @ weight
  products = (query + parameters["position_bias"]) @ relative.T
  padded = np.concatenate([np.zeros((len(query), 1)), products], axis=1)
  shifted = padded.reshape(-1, len(query))[1:].reshape(products.shape)
  content = (query + parameters["content_bias"]) @ key.T
  return (content + shifted) / np.sqrt(query.shape[-1])


def forgetting_of_code(parameters, query, key):
  """The difference of cumulative sums of the logarithms of gates."""
  sums = np.cumsum(parameters["log_gates"])[: len(query)]
  return query @ key.T + sums[:, None] - sums[None]


@pytest.mark.parametrize(
  ("name", "formula"),
  [
    ("shaw", shaw_of_code),
    ("transformer_xl", transformer_xl_of_code),
    ("forgetting", forgetting_of_code),
  ],
)
def test_scores_equal_the_formula_of_the_authors_code(name, formula):
  query, key = draw(24, (11, FEATURES), (11, FEATURES))
  parameters = draw_case(name)
  with wide():
    score = CASES[name].bound(as_arrays(parameters))
    got = np.asarray(jitted(score)(query, key))
  # The code of two of them is for causal attention.
  visible = np.tri(11, k=10 if name == "shaw" else 0)
  want = formula(parameters, query, key)
  np.testing.assert_allclose(got * visible, want * visible, rtol=1e-9)


@sampled("name", CASES, default=["local_p", "disentangled"])
def test_tiles_and_gradients_equal_the_dense_formula(name):
  tokens = draw(1, *SHAPES)
  parameters = draw_case(name)
  with wide():
    point = as_arrays((parameters, *tokens))
    both = [
      jax.jit(jax.value_and_grad(loss(name, each), range(4)))(*point)
      for each in ("reference", TILES)
    ]
    close(both[1], both[0])


@sampled("name", ["shaw", "disentangled", "location"], default=["shaw"])
def test_no_examples(name):
  tokens = [np.zeros((0, *shape[1:]), np.float32) for shape in SHAPES]
  context = result(name, None)(as_arrays(draw_case(name)), *tokens)[0]
  assert context.shape == (0, 11, 5)


@sampled("name", CASES, default=["shaw"])
def test_gradients_equal_differences_of_loops(name):
  query, key, value = draw(2, *SHAPES)
  parameters, direction = draw_case(name), draw_case(name, seed=5)
  tangents = (direction, *draw(6, *SHAPES))
  visible = np.tri(11, 13, 5, dtype=bool)

  def total(size):
    def moved(point, tangent):
      return jax.tree.map(lambda p, t: p + size * t, point, tangent)

    parameters_, query_, key_, value_ = (
      moved(*each) for each in zip((parameters, query, key, value), tangents)
    )
    table = loop(name, parameters_, query_, key_)
    weights = expected_weights(name, table, parameters_, query_, key_, visible)
    return np.sum(np.sin(weights @ value_))

  def of_context(*arguments):
    run = result(name, TILES, mask=masks.causal(5))
    return jnp.sum(jnp.sin(run(*arguments)[0]))

  with wide():
    point = as_arrays((parameters, query, key, value))
    (_, forward), gradient = jax.jit(
      lambda point, tangents: (
        jax.jvp(of_context, point, tangents),
        jax.grad(of_context, range(4))(*point),
      )
    )(point, as_arrays(tangents))
    reverse = sum(
      jax.tree.leaves(
        jax.tree.map(lambda g, t: jnp.sum(g * t), gradient, tangents)
      )
    )
  step = 1e-5
  want = (total(step) - total(-step)) / (2.0 * step)
  close(forward, want, rtol=1e-6, atol=1e-7)
  close(reverse, want, rtol=1e-6, atol=1e-7)


@sampled("name", CASES, default=["transformer_xl"])
def test_hessian_vector_products_equal_the_dense_formula(name):
  with wide():
    point = as_arrays((draw_case(name), *draw(3, *SHAPES)))
    tangent = as_arrays((draw_case(name, seed=5), *draw(6, *SHAPES)))
    both = [
      jax.jit(
        lambda point, tangent, each=each: jax.jvp(
          jax.grad(loss(name, each), range(4)), point, tangent
        )[1]
      )(point, tangent)
      for each in ("reference", TILES)
    ]
    close(both[1], both[0], rtol=1e-8, atol=1e-9)


@sampled("name", CASES, default=["location"])
def test_other_normalizers_equal_the_dense_formula(name):
  point = as_arrays((draw_case(name), *draw(4, *SHAPES)), jnp.float32)

  def run(implementation):
    def context(parameters, query, key, value):
      return attend(
        query,
        key,
        value,
        score=CASES[name].bound(parameters),
        normalizer=normalizers.sparsemax(),
        implementation=implementation,
      )

    return jax.jit(context)(*point)

  if "local_p" in name:
    with pytest.raises(NotImplementedError, match="softmax"):
      run(TILES)
  else:
    close(run(TILES), run("reference"), rtol=1e-4, atol=1e-5)


@sampled("name", CASES, default=["local_m"])
def test_shifted_scores_equal_the_last_rows(name):
  query, key, _ = as_arrays(draw(7, *SHAPES), jnp.float32)
  score = CASES[name].bound(as_arrays(draw_case(name), jnp.float32))
  got = jitted(score.shifted(7))(query[:, 7:], key)
  close(got, jitted(score)(query, key)[:, 7:], rtol=1e-4, atol=1e-5)
  assert score.shifted(7).reads_positions == score.reads_positions


def test_offset_of_a_score_must_be_one_integer():
  score = scores.shaw(jnp.ones((3, 2)))
  for offset in (1.0, jnp.array([1, 2])):
    with pytest.raises(ValueError, match="offset must be one integer"):
      score.shifted(offset)


def far(scores, query_positions, key_positions):
  return scores + jnp.sin(query_positions - 2.0 * key_positions)


def by_head(scores, batch, head, query_positions, key_positions):
  phase = 0.3 * head + 0.7 * batch
  return scores + jnp.sin(phase + query_positions - 2.0 * key_positions)


@sampled("implementation", [TILES, "reference"], default=[TILES])
def test_batch_and_head_are_true_indices_for_grouped_heads(implementation):
  query, key = map(np.float32, draw(9, (2, 6, 5, 4), (2, 3, 7, 4)))
  score = scores.modified(scores.dot(), by_head, with_indices=True)
  got = attend_heads(
    query,
    key,
    key,
    score=score,
    mask=None,
    bias=None,
    implementation=implementation,
  )[0]
  batch, head, rows, columns = np.ogrid[:2, :6, :5, :7]
  keys = np.repeat(key, 2, axis=1)
  phase = 0.3 * head + 0.7 * batch
  table = query @ keys.swapaxes(-1, -2) + np.sin(phase + rows - 2.0 * columns)
  want = loop_attend(table, keys)[0]
  close(got, want, rtol=1e-4, atol=1e-5)


@sampled("name", CASES, default=["disentangled"])
def test_grouped_heads_equal_repeated_keys(name):
  query, key = map(np.float32, draw(10, (4, 13, 4), (2, 13, 4)))
  score = CASES[name].bound(as_arrays(draw_case(name), jnp.float32))
  got = attend_heads(query, key, key, score=score, mask=None, bias=None)[0]
  keys = np.repeat(key, 2, axis=0)
  want = attend(query, keys, keys, score=score)
  close(got, want, rtol=1e-4, atol=1e-5)


def test_each_head_may_have_its_own_table_and_temperature():
  query, key, table = map(np.float32, draw(11, (4, 9, 4), (2, 9, 4), (4, 5, 4)))
  temperature = np.arange(1.0, 5.0, dtype=np.float32)
  score = scores.temperature(scores.shaw(table), temperature)
  got = attend_heads(
    query, key, key, score=score, mask=None, bias=None, implementation=TILES
  )[0]

  @jax.jit
  def alone(table, temperature, query, key):
    own = scores.temperature(scores.shaw(table), temperature)
    return attend(query, key, key, score=own)

  for head in range(4):
    each = (table[head], temperature[head], query[head], key[head // 2])
    close(got[head], alone(*each), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "score",
  [
    scores.forgetting(scores.dot(), jnp.zeros(0)),
    scores.shaw(jnp.ones((3, 4))),
    scores.disentangled(jnp.ones((4, 4)), jnp.ones((4, 4))),
  ],
)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_scores_without_keys_or_queries(score, implementation):
  def context(query):
    value = jnp.ones((0, 5))
    return attend(
      *(query, jnp.ones((0, 4)), value),
      score=score,
      implementation=implementation,
    )

  @jax.jit
  def run(query):
    result, transpose = jax.vjp(context, query)
    return result, transpose(result + 1.0)[0]

  for length in (3, 0):
    result, gradient = run(np.ones((length, 4), np.float32))
    np.testing.assert_array_equal(result, np.zeros((length, 5)))
    assert not np.any(gradient)


@sampled("order", ["contiguous", "zigzag"], default=["zigzag"])
@sampled(
  "name",
  [
    *("local_p", "causal_local_p", "shaw"),
    *("transformer_xl", "forgetting", "location"),
  ],
  default=["local_p"],
)
def test_ring_equals_one_device_with_gradients(name, order):
  length = 12
  parameters = draw_case(name)
  if name == "forgetting":
    parameters["log_gates"] = parameters["log_gates"][:length]
  tokens = draw(12, *((2, length, FEATURES),) * 3)
  parameters, tokens = as_arrays((parameters, tokens), jnp.float32)

  def arguments_of(parameters):
    return {"score": CASES[name].bound(parameters), "mask": masks.causal()}

  spec = jax.P(None, "sequence")
  ring = around(arguments_of, order, make_mesh(sequence=2), spec)
  tolerance = {"rtol": 1e-3, "atol": 1e-4}
  check(ring, alone(arguments_of), tokens, parameters, **tolerance)


def test_sharded_heads_pass_the_index_of_the_head():
  mesh = make_mesh(tensor=2)
  score = scores.modified(scores.scaled_dot(), by_head, with_indices=True)
  tokens = jnp.asarray(draw(13, (2, 5, 8))[0], jnp.float32)
  module = modules.MultiHeadAttention(4, score=score)
  want, variables = jax.jit(module.init_with_output)(jax.random.key(0), tokens)
  sharded = module.clone(mesh_axes=modules.MeshAxes(heads="tensor"))
  with jax.set_mesh(mesh):
    got = jax.jit(sharded.apply)(variables, tokens)
  close(got, want, rtol=1e-4, atol=1e-5)


def test_wrappers_reject_functions():
  for wrap in (
    lambda: scores.modified(lambda q, k: q @ k.mT, far),
    lambda: scores.forgetting(lambda q, k: q @ k.mT, jnp.zeros(3)),
    lambda: scores.soft_cap(lambda q, k: q @ k.mT, 3.0),
    lambda: scores.temperature(lambda q, k: q @ k.mT, 3.0),
    lambda: scores.qk_norm(lambda q, k: q @ k.mT),
    lambda: scores.local(lambda q, k: q @ k.mT, 3.0),
    lambda: scores.positional(3),
    lambda: scores.modified(scores.dot(), 3),
  ):
    with pytest.raises(ValueError, match="must be a"):
      wrap()


@pytest.mark.parametrize(
  ("argument", "score"),
  [
    ("weight", scores.location(jnp.ones((9, 3)))),
    ("relative_keys", scores.shaw(jnp.ones((3, 3)))),
    ("relative_keys", scores.shaw(jnp.ones((4, 4)))),
    ("relative_queries", scores.disentangled(None, jnp.ones((4, 3)))),
    (
      "weight",
      scores.transformer_xl(jnp.ones((5, 4)), jnp.ones(4), jnp.ones(4)),
    ),
    (
      "content_bias",
      scores.transformer_xl(jnp.ones((6, 4)), jnp.ones(3), jnp.ones(4)),
    ),
    ("query_gain", scores.qk_norm(scores.dot(), jnp.ones(3))),
    (
      "query_weight",
      scores.local(scores.dot(), 2, jnp.ones((3, 2)), jnp.ones(2)),
    ),
    (
      "position_weight",
      scores.local(scores.dot(), 2, jnp.ones((4, 2)), jnp.ones(3)),
    ),
  ],
)
def test_errors_name_the_argument(argument, score):
  with pytest.raises(AssertionError, match=rf"^{argument} has"):
    score(jnp.ones((5, 4)), jnp.ones((6, 4)))


def test_windows_without_a_key_have_zero_weights_and_gradients():
  # The window of query 9 and later lies after the last key.
  query, key, value = as_arrays(draw(16, (12, 4), (5, 4), (5, 3)), jnp.float32)

  def total(query, key, value):
    context = attend(
      query,
      key,
      value,
      score=scores.local(scores.dot(), 3),
      implementation=TILES,
    )
    return jnp.sum(context**2), context

  gradients, context = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(
    query, key, value
  )
  np.testing.assert_array_equal(context[8:], 0.0)
  np.testing.assert_array_equal(gradients[0][8:], 0.0)
  assert all(jnp.isfinite(each).all() for each in gradients)


def test_lengths_of_examples_scale_the_predicted_position():
  query, key, weight, vector = as_arrays(
    draw(17, (2, 3, 4), (2, 9, 4), (4, 6), (6,)), jnp.float32
  )
  lengths = jnp.array([5, 9])
  score = scores.local(scores.dot(), 2, weight, vector, length=lengths)
  got = attention_weights(query, key, score=score, mask=masks.padding(lengths))
  alone = scores.local(scores.dot(), 2, weight, vector)
  want = attention_weights(query[0], key[0, :5], score=alone)
  close(got[0, :, :5], want, rtol=1e-4, atol=1e-5)


def test_positions_are_predicted_without_promotion_of_integers():
  (tokens,) = single(0, (5, 4))
  score = scores.local(scores.dot(), 2, jnp.ones((4, 3)), jnp.ones(3))
  with jax.numpy_dtype_promotion("strict"):
    got, want = (
      attend(tokens, tokens, tokens, score=score, implementation=each)
      for each in (Blockwise(query_block=2, key_block=3), "reference")
    )
  close(got, want, rtol=1e-5)


def test_lengths_are_for_local_p_that_is_not_causal():
  weight, vector = jnp.ones((4, 6)), jnp.ones(6)
  score = scores.local(scores.dot(), 2, weight, vector, 5.0, causal=True)
  with pytest.raises(AssertionError, match="length must be None if causal"):
    score(jnp.ones((3, 4)), jnp.ones((3, 4)))


def test_local_p_needs_a_window_above_zero():
  score = scores.local(scores.dot(), 0, jnp.ones((4, 6)), jnp.ones(6))
  with pytest.raises(ValueError, match="window must be above 0 for local-p"):
    score(jnp.ones((3, 4)), jnp.ones((3, 4)))


def only_positive(query, key):
  products = query @ jnp.swapaxes(key, -1, -2)
  return jnp.where(products > 0.0, products, -jnp.inf)


@pytest.mark.parametrize("wrap", [scores.soft_cap, scores.temperature])
@pytest.mark.parametrize("name", ["local", "function"])
def test_wrappers_show_no_key_that_their_score_hides(wrap, name):
  inner = {
    "local": scores.local(scores.dot(), 2),
    "function": scores.as_score(only_positive),
  }[name]
  query, key = as_arrays(draw(19, (9, 4), (9, 4)), jnp.float32)
  hidden = np.isneginf(jitted(inner)(query, key))
  assert hidden.any()

  def total(query, key, number):
    weights = attention_weights(query, key, score=wrap(inner, number))
    return jnp.sum(jnp.sin(weights)), weights

  compute = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))
  gradients, weights = compute(query, key, 3.0)
  np.testing.assert_array_equal(np.asarray(weights) == 0.0, hidden)
  assert all(np.isfinite(each).all() for each in gradients)


def test_modified_scores_have_the_gradients_of_their_arrays():
  query, key, slope = as_arrays(draw(18, (9, 4), (9, 4), ()), jnp.float32)

  def total(slope, implementation):
    def modify(slope, scores, query_positions, key_positions):
      return scores - slope * jnp.abs(query_positions - key_positions)

    score = scores.modified(scores.dot(), jax.tree_util.Partial(modify, slope))
    assert len(jax.tree.leaves(score)) == 1
    return attend(
      query, key, key, score=score, implementation=implementation
    ).var()

  got, want = (
    jax.jit(jax.grad(functools.partial(total, implementation=each)))(slope)
    for each in (TILES, "reference")
  )
  close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("number", "length"), [(300, 5), (640, 5), (5, 640)])
def test_relative_products_equal_a_look_up_for_few_and_many(number, length):
  tokens, table = single(0, (2, number, 4), (9, 4))
  first = -number // 2
  scores = jnp.ones((2, number, length))
  found = jax.jit(
    lambda tokens: distances.with_products(scores, tokens, table, first)
  )(tokens)
  # The distance of the first key from the last token is `first`.
  numbers = first + np.arange(length)[None] + number - 1
  numbers = numbers - np.arange(number)[:, None]
  expected = np.einsum(
    "btd,tsd->bts", tokens, np.asarray(table)[np.clip(numbers, 0, 8)]
  )
  np.testing.assert_allclose(found, 1.0 + expected, atol=1e-5)


@sampled(
  ("first", "size", "by_key"),
  [
    (first, size, by_key)
    for first, size in (
      *((first, 9) for first in (-400, -200, -90, -33, 0, 7, 150)),
      *((-70, size) for size in (1, 2)),
    )
    for by_key in (False, True)
  ],
  # No distance in the table, and some.
  default=[(-400, 9, True), (-33, 9, False)],
)
def test_relative_products_of_small_tables_equal_a_look_up(first, size, by_key):
  number, length = 64, 256
  with wide():
    tokens, table, tangents, cotangent = map(
      jnp.asarray,
      draw(0, (2, number, 4), (size, 4), (2, number, 4), (2, number, length)),
    )
    if by_key:
      cotangent = jnp.swapaxes(cotangent, 1, 2)
    numbers = first + np.arange(length)[None] + number - 1
    numbers = np.clip(numbers - np.arange(number)[:, None], 0, size - 1)

    def found(tokens, table, scores):
      return distances.with_products(
        scores, tokens, table, first, by_key=by_key
      )

    def on_accelerators(tokens, table, scores):
      arguments = scores, tokens, table, jnp.int32(first)
      return distances._by_look_up(look_up.looked_up, by_key, *arguments)

    def looked_up(tokens, table, scores):
      products = jnp.einsum("btd,tsd->bts", tokens, table[numbers])
      return scores + (jnp.swapaxes(products, 1, 2) if by_key else products)

    def derivatives(function):
      def total(*point):
        return jnp.sum(cotangent * jnp.sin(function(*point)))

      gradient = jax.grad(total, (0, 1, 2))
      point = tokens, table, jnp.cos(cotangent)
      directions = tangents, table, cotangent
      return function(*point), *jax.jvp(gradient, point, directions)

    of_strips, of_look_up, expected = (
      jax.jit(derivatives, static_argnums=0)(each)
      for each in (found, on_accelerators, looked_up)
    )
    close(of_strips, expected)
    close(of_look_up, expected)


def test_relative_products_of_several_starts_and_a_table_for_each_head():
  with wide():
    scores, tokens, table, cotangent = map(
      jnp.asarray, draw(2, (2, 64, 256), (2, 64, 4), (2, 9, 4), (2, 64, 256))
    )
    firsts = jnp.array([-200, -70, -33, 60])

    def looked_up(tokens, table, first):
      numbers = first + 63 - jnp.arange(64)[:, None] + jnp.arange(256)[None]
      vectors = table[:, jnp.clip(numbers, 0, 8)]
      return scores + jnp.einsum("htd,htsd->hts", tokens, vectors)

    def with_gradients(function, first):
      found, pull = jax.vjp(
        lambda tokens, table: function(tokens, table, first), tokens, table
      )
      return found, *pull(cotangent)

    at_once = functools.partial(distances.with_products, scores)
    got, expected = (
      jax.jit(jax.vmap(functools.partial(with_gradients, each)))(firsts)
      for each in (at_once, looked_up)
    )
    close(got, expected)


def test_unskewed_is_the_transpose_of_the_skew():
  found, cotangent = as_arrays(draw(1, (2, 5, 12), (2, 5, 7)), jnp.float32)

  @jax.jit
  def run(found, cotangent):
    _, pull = jax.vjp(lambda found: skew.skew(7, found), found)
    return skew.unskewed(cotangent), pull(cotangent)[0]

  np.testing.assert_array_equal(*run(found, cotangent))
