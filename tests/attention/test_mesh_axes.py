"""Attention with heads and tokens sharded over a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import biases, masks, scores
from attention.implementations import Pallas
from attention.modules import (
  POSITIONAL_SCORE_NAMES,
  SCORE_NAMES,
  MeshAxes,
  MultiHeadAttention,
)
from attention.ring import arrange, restore
from tests.attention.comparison import close
from tests.matrix import sampled, sampled_product
from tests.meshes import make_mesh

MESH = {"data": 2, "sequence": 2, "tensor": 2}
LENGTH, MEMORY = 16, 24
GENERATOR = np.random.default_rng(7)
MODULE = MultiHeadAttention(num_heads=4, features=8, rotary=True)
BOTH = MeshAxes("tensor", "sequence", order="zigzag")
HEADS = MeshAxes(heads="tensor")
CAUSAL = {"mask": masks.causal()}


def tokens(length, seed):
  drawn = np.random.default_rng(seed).normal(size=(4, length, 8))
  return jnp.asarray(drawn.astype(np.float32))


def drawn_variables(module, *tokens):
  """Variables of the module, without a program that computes them."""
  generator = np.random.default_rng(3)
  shapes = jax.eval_shape(module.init, jax.random.key(0), *tokens)
  return jax.tree.map(
    lambda leaf: np.float32(0.4 * generator.normal(size=leaf.shape)), shapes
  )


def loss_and_gradients(module, query, key, order=None, **options):
  """The loss, and its gradients for parameters and tokens.

  With `order`, the MeshAxes, the tokens are arranged in its order.
  """
  options = {"deterministic": True, **options}
  rngs = {"dropout": jax.random.key(5)}
  variables = drawn_variables(module.clone(mesh_axes=None), query, key)
  weight = jnp.linspace(-1, 1, query.size).reshape(query.shape)

  def loss(variables, query, key):
    apply = functools.partial(module.apply, variables, rngs=rngs, **options)
    if order is None:
      return jnp.sum(weight * jnp.sin(apply(query, key)))
    layout = {"axis": -2, "order": order.order}
    found = apply(
      *(arrange(each, order.ring_size, **layout) for each in (query, key))
    )
    found = restore(found, order.ring_size, **layout)
    return jnp.sum(weight * jnp.sin(found))

  both = jax.value_and_grad(loss, (0, 1, 2))
  return jax.jit(both)(variables, query, key)


def check(
  module,
  order,
  shape=None,
  length=LENGTH,
  memory=MEMORY,
  implementation=None,
  **options,
):
  given = tokens(length, 1), tokens(memory, 2)
  want = loss_and_gradients(module, *given, **options)
  with jax.set_mesh(make_mesh(**(shape or MESH))):
    module = module.clone(mesh_axes=order, implementation=implementation)
    got = loss_and_gradients(module, *given, order, **options)
  close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("score", SCORE_NAMES)
def test_every_score_with_heads_and_tokens_sharded(score):
  check(MODULE.clone(score=score), BOTH, **CAUSAL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["heads", "sequence"])
def test_only_heads_or_only_tokens_sharded(name):
  axis = {"heads": "tensor", "sequence": "sequence"}[name]
  order = MeshAxes(**{name: axis})
  check(MODULE.clone(score="additive"), order, {axis: 4, "data": 2}, **CAUSAL)


@pytest.mark.exhaustive
def test_tokens_in_contiguous_order():
  order = MeshAxes(sequence="sequence")
  check(MODULE, order, {"sequence": 8}, **CAUSAL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["array", "padding"])
def test_grouped_heads_and_padding(kind):
  module = MODULE.clone(num_key_value_heads=2, score="general")
  lengths = jnp.array([3, 24, 10, 17])
  padding = jnp.arange(MEMORY)[None] < lengths[:, None]
  mask = {"array": padding[:, None, None], "padding": masks.padding(lengths)}
  check(module, BOTH, mask=mask[kind])


@pytest.mark.exhaustive
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("order", [BOTH, HEADS, MeshAxes(sequence="sequence")])
def test_dropout_equals_that_of_one_device(groups, order):
  module = MODULE.clone(dropout_rate=0.5, num_key_value_heads=groups)
  options = {"deterministic": False, **CAUSAL}
  check(module, order, **options)


@sampled(
  ("memory_heads", "devices", "score"),
  [(1, 2, "scaled_dot"), (2, 4, "concat"), (1, 4, "additive")],
  default=[(1, 2, "scaled_dot")],
)
def test_fewer_key_value_heads_than_devices(memory_heads, devices, score):
  module = MultiHeadAttention(
    4, num_key_value_heads=memory_heads, score=score, dropout_rate=0.3
  )
  options = {"deterministic": False, "bias": biases.alibi(4), **CAUSAL}
  check(module, HEADS, {"tensor": devices}, **options)


def test_key_value_heads_that_cannot_be_sharded_raise():
  module = MultiHeadAttention(
    num_heads=6, num_key_value_heads=3, mesh_axes=HEADS
  )
  with (
    jax.set_mesh(make_mesh(tensor=2)),
    pytest.raises(ValueError, match="3 key/value heads cannot be sharded"),
  ):
    jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, 6, 12)))


KERNELS = Pallas(interpret=True)
ALL = MeshAxes("tensor", "sequence", "zigzag", ("data",))
OF_EXAMPLES = {
  "padding": {"mask": masks.padding(jnp.array([3, 24, 10, 17]))},
  "segments": {
    "mask": masks.segments(
      jnp.arange(4 * LENGTH).reshape(4, LENGTH) // 7,
      jnp.arange(4 * MEMORY).reshape(4, MEMORY) // 11,
    )
  },
  "array": {"mask": GENERATOR.random((4, 1, LENGTH, MEMORY)) < 0.7},
  "array of heads": {"bias": GENERATOR.normal(size=(4, 4, LENGTH, MEMORY))},
  "causal": {
    "mask": masks.causal(jnp.array([3, 24, 10, 17]))
    & masks.sliding_window(9, None),
    "bias": 0.5 * biases.alibi(4)
    + biases.relative_position(jnp.asarray(GENERATOR.normal(size=(8, 4)))),
  },
}
CASES = [*OF_EXAMPLES, "dropout", "all heads share", "score of examples"]


@sampled_product(
  ("name", "order", "implementation"),
  (CASES, [ALL, MeshAxes(batch=("data", "tensor"))], [None, KERNELS]),
  default=[
    ("causal", MeshAxes(batch=("data", "tensor")), KERNELS),
    ("dropout", ALL, None),
  ],
)
def test_examples_sharded(name, order, implementation):
  shape = {"data": 2, "tensor": 2, "sequence": 2 if order.sequence else 1}
  module = MODULE.clone(num_key_value_heads=2)
  options = {**OF_EXAMPLES.get(name, {})}
  if name == "dropout":
    module = module.clone(dropout_rate=0.5)
    options |= {"deterministic": False, **CAUSAL}
  elif name == "all heads share":
    module = MODULE.clone(score=scores.general(jnp.ones((2, 2))))
  elif name == "score of examples":
    scale = jnp.array([[1.0], [2.0], [0.5], [3.0]]) * jnp.ones((4, 4))
    module = MODULE.clone(score=scores.scaled_dot(scale=scale))
  options = jax.tree.map(
    lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), options
  )
  check(module, order, shape, implementation=implementation, **options)


@sampled("shape", [(1, 16, 8), (16, 8)], default=[(1, 16, 8)])
def test_one_example_is_replicated(shape):
  query = jnp.asarray(GENERATOR.normal(size=shape), jnp.float32)
  variables = drawn_variables(MODULE, query)
  module = MODULE.clone(mesh_axes=MeshAxes("tensor", batch="data"))
  with jax.set_mesh(make_mesh(**MESH)):
    got = jax.jit(module.apply)(variables, query)
  want = jax.jit(MODULE.apply)(variables, query)
  np.testing.assert_allclose(got, want, atol=1e-5)


@sampled("implementation", [None, KERNELS], default=[KERNELS])
def test_numbers_by_position_with_examples_and_heads_sharded(implementation):
  gates = -jnp.abs(jnp.asarray(GENERATOR.normal(size=(4, 4, MEMORY))))
  score = scores.forgetting(scores.dot(), gates)
  order = MeshAxes("tensor", batch=("data",))
  shape = {"data": 2, "tensor": 2}
  module = MODULE.clone(score=score)
  check(module, order, shape, implementation=implementation, **CAUSAL)


def test_an_array_of_examples_that_a_score_captures_is_an_error():
  factor = jnp.ones((4, 1, 1, 1))
  score = lambda query, key: factor * (query @ key.mT)  # noqa: E731
  query = tokens(LENGTH, 1)
  module = MODULE.clone(score=score, mesh_axes=MeshAxes(batch=("data",)))
  variables = jax.eval_shape(MODULE.init, jax.random.key(0), query)
  with (
    jax.set_mesh(make_mesh(data=4)),
    pytest.raises(ValueError, match="axis of examples that is not declared"),
  ):
    jax.eval_shape(module.apply, variables, query)


def _scaled_by_the_number_of_heads(query, key):
  return query.shape[-3] * (query @ key.mT)


def _relu_divided_by_heads(scores):
  return jax.nn.relu(scores) / scores.shape[-3]


SLOPES = jnp.arange(4.0)


@pytest.mark.parametrize(
  ("refused", "own"),
  [
    ("score", {"score": _scaled_by_the_number_of_heads}),
    ("normalizer", {"normalizer": _relu_divided_by_heads}),
    ("normalizer", {"normalizer": functools.partial(jax.nn.softmax, axis=-3)}),
    (None, {"score": lambda query, key: 2.0 * (query @ key.mT)}),
    (None, {"normalizer": jax.nn.relu}),
    (
      None,
      {
        "score": scores.modified(
          scores.dot(),
          lambda scores, batch, head, row, column: scores * SLOPES[head],
          with_indices=True,
        )
      },
    ),
  ],
)
def test_functions_that_read_heads_are_refused_if_heads_are_sharded(
  refused, own
):
  query = tokens(LENGTH, 1)
  module = MODULE.clone(num_key_value_heads=2, mesh_axes=HEADS, **own)
  with jax.set_mesh(make_mesh(**MESH)):
    initialize = functools.partial(module.init_with_output, jax.random.key(0))
    if refused is None:
      assert jax.eval_shape(initialize, query)[0].shape == query.shape
      return
    with pytest.raises(NotImplementedError, match=f"^{refused} is a function"):
      jax.eval_shape(initialize, query)


def test_axes_may_be_one_name_and_shard_one_axis_each():
  assert MeshAxes(batch="data") == MeshAxes(batch=["data"])
  with pytest.raises(ValueError, match="can shard one axis only"):
    MeshAxes(heads="data", batch=("data",))


@pytest.mark.exhaustive
def test_bias_for_all_heads():
  bias = jax.random.normal(jax.random.key(3), (LENGTH, MEMORY))
  check(MODULE, BOTH, bias=bias)


@pytest.mark.exhaustive
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("order", [BOTH, HEADS])
def test_masks_of_heads(groups, order):
  module = MODULE.clone(num_key_value_heads=groups)
  shape = (1, 4, LENGTH, MEMORY)
  visible = np.random.default_rng(3).random(shape) < 0.7
  visible[..., 0] = True
  check(module, order, mask=jnp.asarray(visible))


@pytest.mark.exhaustive
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("order", [BOTH, HEADS])
def test_biases_of_heads(groups, order):
  module = MODULE.clone(num_key_value_heads=groups)
  rng = jax.random.key(3)
  shape = (1, 4, LENGTH, MEMORY)
  bias = biases.alibi(4) + jax.random.normal(rng, shape)
  check(module, order, bias=bias, mask=masks.causal(MEMORY - LENGTH))


def test_gradient_of_a_bias_with_sharded_heads():
  query = tokens(LENGTH, 1)
  variables = drawn_variables(MODULE, query)
  bias = jax.random.normal(jax.random.key(3), (4, LENGTH, LENGTH))

  def loss(bias, module):
    return jnp.sum(jnp.sin(module.apply(variables, query, bias=bias)))

  want = jax.jit(jax.grad(loss), static_argnums=1)(bias, MODULE)
  module = MODULE.clone(mesh_axes=HEADS)
  with jax.set_mesh(make_mesh(**MESH)):
    got = jax.jit(jax.grad(loss), static_argnums=1)(bias, module)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@sampled(
  "normalizer", ["sigmoid", "entmax", "stick_breaking"], default=["entmax"]
)
def test_normalizers_of_rows_beside_axes_that_are_not_named(normalizer):
  module = MODULE.clone(normalizer=normalizer)
  check(module, HEADS, implementation="blockwise", **CAUSAL)


@sampled("score", POSITIONAL_SCORE_NAMES, default=["local_m"])
def test_positional_scores_beside_axes_that_are_not_named(score):
  check(MODULE.clone(score=score), HEADS, implementation="blockwise", **CAUSAL)


@pytest.mark.exhaustive
def test_score_without_axes_of_heads():
  weight = jax.random.normal(jax.random.key(4), (2, 2))
  check(MODULE.clone(score=scores.general(weight)), BOTH, **CAUSAL)


@pytest.mark.exhaustive
def test_the_compiled_program_has_no_all_gather():
  query = tokens(64, 1)
  module = MODULE.clone(rotary=False, mesh_axes=BOTH)
  variables = module.clone(mesh_axes=None).init(jax.random.key(0), query)
  with jax.set_mesh(make_mesh(**MESH)):
    place = jax.P("data", "sequence")
    query = jax.device_put(query, place)

    def loss(variables, query):
      return jnp.sum(module.apply(variables, query, **CAUSAL) ** 2)

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(variables, query)
    text = lowered.compile().as_text()
  assert "collective-permute" in text
  assert "all-gather" not in text


def test_errors_state_the_sizes():
  query = tokens(LENGTH, 1)
  module = MODULE.clone(mesh_axes=BOTH)
  variables = jax.eval_shape(MODULE.init, jax.random.key(0), query)
  apply = functools.partial(jax.eval_shape, module.apply, variables)
  with pytest.raises(ValueError, match=r"jax\.set_mesh"):
    apply(query)
  with (
    jax.set_mesh(make_mesh(tensor=8, sequence=1)),
    pytest.raises(ValueError, match="4 heads cannot be sharded over the 8"),
  ):
    apply(query)
  of_examples = module.clone(mesh_axes=MeshAxes(batch=("data",)))
  with (
    jax.set_mesh(make_mesh(data=8)),
    pytest.raises(ValueError, match="4 examples cannot be sharded over the 8"),
  ):
    jax.eval_shape(of_examples.apply, variables, query)
  for heads in (2, 3):  # the module has four, sharded over two devices
    own = jnp.ones((1, heads, LENGTH, LENGTH), bool)
    with (
      jax.set_mesh(make_mesh(**MESH)),
      pytest.raises(ValueError, match="axis -3 must be 1 or 4"),
    ):
      apply(query, mask=own)
  with (
    jax.set_mesh(make_mesh(**MESH)),
    pytest.raises(ValueError, match="does not divide into 4"),
  ):
    apply(query[:, :6])
