"""Shardings of results on meshes with explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention import (
  attend,
  attention_weights,
  cache,
  masks,
  multi_head_attention,
  scores,
)
from attention.modules import MultiHeadAttention
from attention.multi_head.grouped_query import attend_heads
from tests.attention.comparison import SMALL, close
from tests.attention.oracle import draw, single
from tests.matrix import sampled, sampled_product
from tests.meshes import make_mesh


def placed(array, *spec):
  sharding = NamedSharding(
    make_mesh(AxisType.Explicit, batch=4, head=2), PartitionSpec(*spec)
  )
  return jax.device_put(jnp.asarray(array, jnp.float32), sharding)


def layout(array):
  return tuple(jax.typeof(array).sharding.spec)


def check(function, arrays, specs, expected):
  """Compares the result and the gradients with those without a mesh."""

  def loss(*arrays):
    result = function(*arrays)
    return jnp.sum(jnp.sin(result)), result

  places = range(len(arrays))
  gradient = jax.grad(loss, places, has_aux=True)
  arrays = [jnp.asarray(array, jnp.float32) for array in arrays]
  on_mesh = [placed(array, *spec) for array, spec in zip(arrays, specs)]
  want = jax.jit(gradient)(*arrays)
  with jax.set_mesh(make_mesh(AxisType.Explicit, batch=4, head=2)):
    got = jax.jit(gradient)(*on_mesh)
  assert layout(got[1]) == expected
  assert [*map(layout, got[0])] == [*map(layout, on_mesh)]
  close(got, want, rtol=1e-4, atol=1e-5)


@sampled(
  ("specs", "expected"),
  [
    ([("batch", "head")] * 3, ("batch", "head", None, None)),
    ([("batch",), (None, "head"), ()], ("batch", "head", None, None)),
    (
      [(None, None, "batch"), (None, None, "head"), ()],
      (None, None, "batch", None),
    ),
    ([(None, None, "head")] * 3, (None, None, "head", None)),
    ([(None, None, None, "batch")] * 3, (None, None, None, "batch")),
    ([(), (), (("batch", "head"),)], (("batch", "head"), None, None, None)),
  ],
  default=[([("batch",), (None, "head"), ()], ("batch", "head", None, None))],
)
def test_context_has_the_sharding_of_the_tokens(specs, expected):
  def run(query, key, value):
    return attend(query, key, value, mask=masks.causal(4), implementation=SMALL)

  arrays = draw(0, (8, 2, 4, 4), (8, 2, 8, 4), (8, 2, 8, 4))
  check(run, arrays, specs, expected)


@pytest.mark.exhaustive
def test_keys_without_the_leading_axes_of_the_query():
  def run(query, key, value):
    return attend(query, key, value, implementation=SMALL)

  arrays = draw(1, (4, 2, 5, 4), (7, 4), (2, 7, 3))
  specs = [("batch",), (), ("head",)]
  check(run, arrays, specs, ("batch", "head", None, None))


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", ["reference", SMALL])
def test_additive_scores_biases_and_dropout(implementation):
  def run(tokens, query_weight, score_weight, bias):
    return attend(
      tokens,
      tokens,
      tokens,
      score=scores.additive(query_weight, jnp.eye(4), score_weight),
      bias=bias,
      mask=masks.padding(jnp.array([2, 6, 5, 4])),
      dropout_rate=0.3,
      rng=jax.random.key(0),
      implementation=implementation,
    )

  arrays = draw(2, (4, 2, 6, 4), (2, 4, 4), (4,), (2, 6, 6))
  specs = [("batch", "head"), ("head",), (), (None, "head")]
  check(run, arrays, specs, ("batch", "head", None, None))


def test_arrays_of_a_partial_function_may_be_sharded():
  def distance(scale, query, key):
    gap = query[..., :, None, :] - key[..., None, :, :]
    return -jnp.sum(jnp.abs(gap), axis=-1) * scale

  def run(tokens, scale):
    return attend(
      tokens,
      tokens,
      tokens,
      score=jax.tree_util.Partial(distance, scale),
      implementation=SMALL,
    )

  specs = [("batch",), (None, "head")]
  check(
    run, draw(3, (4, 2, 6, 4), (1, 2, 1, 1)), specs, ("batch", None, None, None)
  )


def test_captured_array_on_an_explicit_mesh_raises_with_a_hint():
  tokens, scale = placed(draw(4, (4, 6, 4))[0], "batch"), placed(1.0)
  with pytest.raises(ValueError, match="mesh") as raised:
    attend(tokens, tokens, tokens, score=lambda q, k: q @ k.mT * scale)
  assert "jax.tree_util.Partial(function, array)" in raised.value.__notes__[-1]


def test_lse_has_the_sharding_of_the_query():
  (tokens,) = draw(5, (4, 2, 6, 4))
  tokens = placed(tokens, "batch", None, "head")
  context, lse = attend(tokens, tokens, tokens, return_lse=True)
  assert layout(context) == ("batch", None, "head", None)
  assert layout(lse) == ("batch", None, "head")


def test_sharding_of_attention_weights():
  def run(query, key):
    return attention_weights(key=key, query=query)

  specs = [(None, None, "head"), (None, None, "batch")]
  arrays = draw(6, (3, 2, 6, 4), (3, 2, 8, 4))
  check(run, arrays, specs, (None, None, "head", "batch"))


def test_sharding_with_grouped_heads():
  def run(query, key):
    score, mask = scores.dot(), masks.causal()
    return attend_heads(query, key, key, score=score, mask=mask, bias=None)[0]

  specs = [("batch", "head")] * 2
  arrays = draw(7, (4, 4, 6, 4), (4, 2, 6, 4))
  check(run, arrays, specs, ("batch", "head", None, None))


def test_multi_head_attention_with_sharded_heads():
  def run(tokens, weight, output_weight):
    weights = (weight, weight, weight, output_weight)
    return multi_head_attention(tokens, tokens, tokens, *weights)

  specs = [("batch",), (None, "head"), ("head",)]
  arrays = draw(8, (4, 6, 4), (4, 2, 3), (2, 3, 4))
  check(run, arrays, specs, ("batch", None, None))


@pytest.mark.exhaustive
def test_attention_to_a_projected_memory():
  module = MultiHeadAttention(num_heads=4, num_key_value_heads=2, rotary=True)
  query, memory = draw(10, (4, 6, 8), (4, 8, 8))
  shapes = jax.eval_shape(module.init, jax.random.key(0), query, memory)
  shapes, structure = jax.tree.flatten(shapes)
  weights = draw(11, *(each.shape for each in shapes))
  specs = {1: (), 2: ("head",), 3: (None, "head")}
  weights = [placed(each, *specs[each.ndim]) for each in weights]
  query, memory = placed(query, "batch"), placed(memory, "batch")

  @jax.jit
  def gradients_and_outputs(weights, query, memory):
    def loss(weights, query, memory, projected):
      bound = module.bind(jax.tree.unflatten(structure, weights))
      if projected:
        outputs = bound.attend_projected(query, bound.project(memory))
      else:
        outputs = bound(query, memory)
      return jnp.sum(jnp.sin(outputs)), outputs

    gradient = jax.grad(loss, (0, 1, 2), has_aux=True)
    return [gradient(weights, query, memory, way) for way in (True, False)]

  with jax.set_mesh(make_mesh(AxisType.Explicit, batch=4, head=2)):
    got, want = gradients_and_outputs(weights, query, memory)
  assert layout(got[1]) == ("batch", None, None)
  assert jax.tree.map(layout, got) == jax.tree.map(layout, want)
  close(got, want, rtol=1e-4, atol=1e-5)


def test_a_cache_keeps_its_sharding():
  tokens, weight, output_weight = draw(9, (4, 6, 4), (4, 2, 3), (2, 3, 4))

  def decode(tokens, weight, output_weight, held):
    def step(held, token):
      weights = (weight, weight, weight, output_weight)
      outputs, held = multi_head_attention(
        token, token, token, *weights, cache=held
      )
      return held, outputs

    return jax.lax.scan(step, held, tokens)

  tokens = tokens.reshape(4, 2, 3, 4).swapaxes(0, 1)
  arrays = [jnp.asarray(each, "f4") for each in (tokens, weight, output_weight)]
  held = cache.init((4, 2), 8, 3)
  want = jax.jit(decode)(*arrays, held)
  specs = [(None, "batch"), (None, "head"), ("head",)]
  on_mesh = [placed(array, *spec) for array, spec in zip(arrays, specs)]
  held = cache.Cache(
    placed(held.key, "batch", "head"),
    placed(held.value, "batch", "head"),
    held.length,
  )
  with jax.set_mesh(make_mesh(AxisType.Explicit, batch=4, head=2)):
    got = jax.jit(decode)(*on_mesh, held)
  assert layout(got[0].key) == ("batch", "head", None, None)
  assert layout(got[1]) == (None, "batch", None, None)
  close(got, want, rtol=1e-4, atol=1e-5)


@sampled_product(
  ("kind", "implementation"),
  ([AxisType.Auto, AxisType.Explicit], ["reference", SMALL]),
  default=[(AxisType.Explicit, SMALL)],
)
def test_shard_map_over_some_axes_of_the_mesh(kind, implementation):
  def gradient(tokens):
    return jax.grad(
      lambda tokens: jnp.sum(
        jnp.sin(attend(tokens, tokens, tokens, implementation=implementation))
      )
    )(tokens)

  mesh = make_mesh(kind, batch=4, head=2)
  (tokens,) = single(9, (4, 2, 6, 4))
  spec = PartitionSpec("batch", "head")
  with jax.set_mesh(mesh):
    run = jax.shard_map(
      gradient,
      in_specs=PartitionSpec("batch"),
      out_specs=PartitionSpec("batch"),
      axis_names={"batch"},
    )
    got = jax.jit(run)(jax.device_put(tokens, NamedSharding(mesh, spec)))
  np.testing.assert_allclose(
    got, jax.jit(gradient)(tokens), rtol=1e-4, atol=1e-5
  )
