"""Ring attention equals attention on one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from attention import attend, biases, masks, scores
from attention.implementations import Pallas
from attention.implementations.blockwise import Blockwise
from attention.masks.tile_visibility import Ranges, visibility
from attention.positional.base import EMPTY, FULL
from attention.ring import (
  arrange,
  layout,
  restore,
  ring_attention,
  ring_positions,
)
from attention.ring.order import chunk_of
from tests.attention.comparison import close, wide
from tests.attention.oracle import draw
from tests.matrix import sampled, sampled_product
from tests.meshes import make_mesh

LENGTH = 32
ORDERS = ("zigzag", "contiguous")
HEADS = PartitionSpec(None, None, "sequence")


def around(
  arguments_of, order="zigzag", mesh=None, spec=HEADS, check=True, **options
):
  """(tokens, parameters) -> context and lse, by ring attention."""
  mesh = mesh or make_mesh(sequence=4)
  size = mesh.shape["sequence"]

  def local(query, key, value, parameters):
    return ring_attention(
      query,
      key,
      value,
      axis_name="sequence",
      order=order,
      return_lse=True,
      **arguments_of(parameters),
      **options,
    )

  def run(tokens, parameters):
    divided = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(*(spec,) * 3, PartitionSpec()),
      out_specs=spec,
      check_vma=check,
    )
    axis = len(spec) - 1
    tokens = [arrange(each, size, axis=axis, order=order) for each in tokens]
    return tuple(
      restore(each, size, axis=axis, order=order)
      for each in divided(*tokens, parameters)
    )

  return jax.jit(run)


@functools.cache
def alone(arguments_of):
  def run(tokens, parameters):
    return attend(*tokens, return_lse=True, **arguments_of(parameters))

  return jax.jit(run)


def check(ring, one, tokens, parameters, **tolerance):
  """Compares contexts, lses and all gradients."""
  tolerance = {"rtol": 1e-4, "atol": 2e-5} | tolerance
  got, want = (
    gradients_and_results(run, tokens, parameters) for run in (ring, one)
  )
  close(got, want, **tolerance)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=(1, 2), has_aux=True)
def gradients_and_results(run, tokens, parameters):
  context, lse = run(tokens, parameters)
  finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
  return jnp.sum(jnp.sin(context)) + jnp.sum(jnp.cos(finite)), (context, lse)


def manhattan(weight, query, key):
  gap = (query @ weight)[..., :, None, :] - key[..., None, :, :]
  return -0.3 * jnp.abs(gap).sum(-1)


IDS = np.arange(LENGTH) // 5
CASES = {
  "everyone": lambda p: {},
  "causal": lambda p: {"mask": masks.causal()},
  "window": lambda p: {"mask": masks.sliding_window(3, 0)},
  "nobody": lambda p: {"mask": masks.causal(-LENGTH)},
  "segments": lambda p: {
    "mask": masks.segments(jnp.asarray(IDS), jnp.asarray(IDS)) & masks.causal()
  },
  "prefix": lambda p: {"mask": masks.causal() | masks.prefix(11)},
  "prefixes": lambda p: {
    "mask": masks.causal() | masks.prefix(jnp.array([3, 0]))
  },
  "later": lambda p: {"mask": ~masks.causal()},
  "lengths": lambda p: {"mask": masks.padding(jnp.array([9, 30]))},
  "array": lambda p: {
    "mask": jnp.asarray(draw(5, (LENGTH, LENGTH))[0] > 0.5),
    "bias": p["pairs"],
  },
  "general": lambda p: {
    "score": scores.general(p["square"]),
    "bias": biases.relative_position(p["table"]),
    "mask": masks.causal(),
  },
  "additive": lambda p: {
    "score": scores.additive(p["square"], p["square"], p["vector"], p["vector"])
  },
  "cosine": lambda p: {"score": scores.cosine(p["sharpness"])},
  "own": lambda p: {
    "score": jax.tree_util.Partial(manhattan, p["square"]),
    "bias": biases.alibi(3),
  },
}


def given():
  tokens = draw(0, *[(2, 3, LENGTH, 8)] * 3)
  square, vector, table, pairs = draw(1, (8, 8), (8,), (8, 3), (LENGTH, LENGTH))
  parameters = {
    "square": 0.3 * square,
    "vector": vector,
    "table": table,
    "pairs": pairs,
    "sharpness": np.float32(3.0),
  }
  return jax.tree.map(
    lambda array: jnp.asarray(array, jnp.float32), (tokens, parameters)
  )


# Of cases whose gradients are exhaustive, below.
@pytest.mark.parametrize(
  ("name", "order"),
  [("everyone", "zigzag"), ("array", "zigzag"), ("window", "contiguous")],
)
def test_context_and_lse(name, order):
  arguments = given()
  got, want = (
    jax.jit(run)(*arguments)
    for run in (around(CASES[name], order), alone(CASES[name]))
  )
  close(got, want, rtol=1e-4, atol=2e-5)


@sampled_product(
  ("name", "order"), (CASES, ORDERS), default=[("causal", "zigzag")]
)
def test_results_and_gradients_of_every_score_mask_and_bias(name, order):
  check(around(CASES[name], order), alone(CASES[name]), *given())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_shards_of_several_tiles(name):
  tiles = Blockwise(query_block=3, key_block=2, leading_block=2)
  check(around(CASES[name], implementation=tiles), alone(CASES[name]), *given())


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_chunks_of_several_blocks(name, order, monkeypatch):
  monkeypatch.setattr(layout, "_BLOCK_SIZE", 2)
  assert layout.ShardLayout.of("key", LENGTH // 4, order).blocks_per_chunk > 1
  check(around(CASES[name], order), alone(CASES[name]), *given())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["lengths", "additive"])
def test_queries_and_keys_with_blocks_of_different_sizes(name, monkeypatch):
  monkeypatch.setattr(layout, "_BLOCK_SIZE", 3)
  (query, key, value), parameters = given()
  query = query[:, :, : LENGTH // 4]
  cuts = [
    layout.ShardLayout.of("", each.shape[2] // 4, "zigzag")
    for each in (query, key)
  ]
  assert cuts[0].size != cuts[1].size
  check(
    around(CASES[name]), alone(CASES[name]), (query, key, value), parameters
  )


@pytest.mark.parametrize(
  ("shard", "expected"),
  [
    (0, (2, 1, 0)),
    (8, (2, 1, 4)),
    (512, (2, 1, 256)),
    (4096, (2, 8, 256)),
    (2 * 3 * 250, (2, 3, 250)),
    (2 * 1021, (2, 1, 1021)),  # a prime: blocks of 1 token would be slow
  ],
)
def test_block_size(shard, expected):
  cut = layout.ShardLayout.of("key", shard, "zigzag")
  assert (cut.chunks, cut.blocks_per_chunk, cut.size) == expected


def test_a_block_is_a_whole_chunk_on_accelerators(monkeypatch):
  assert not layout.is_on_accelerator()
  monkeypatch.setattr(layout, "is_on_accelerator", lambda: True)
  cut = layout.ShardLayout.of("key", 4096, "zigzag")
  assert (cut.chunks, cut.blocks_per_chunk, cut.size) == (2, 1, 2048)


@sampled(
  "name",
  [
    *("everyone", "causal", "window", "nobody", "later", "lengths"),
    *("additive", "cosine", "own", "general"),
  ],
  default=["causal"],
)
def test_kernels_of_each_pair_of_shards(name):
  kernels = Pallas(interpret=True)
  check(
    around(CASES[name], implementation=kernels), alone(CASES[name]), *given()
  )


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_devices(size):
  (query, key, value), parameters = given()
  tokens = [each[:, :, :24] for each in (query, key, value)]
  mesh = make_mesh(sequence=size)
  check(
    around(CASES["causal"], mesh=mesh),
    alone(CASES["causal"]),
    tokens,
    parameters,
  )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["causal", "general", "own"])
def test_in_double_precision(name):
  with wide():
    arguments = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), given())
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    check(around(CASES[name]), alone(CASES[name]), *arguments, **tolerance)


@sampled(
  ("name", "implementation"),
  [
    *itertools.product(("everyone", "general", "window", "own"), (None,)),
    *itertools.product(("everyone", "general"), (Blockwise(8, 8),)),
    ("everyone", Pallas(interpret=True)),
  ],
  default=[("everyone", None)],
)
def test_second_derivatives_in_each_mode(name, implementation):
  def derivatives(run, others, arguments, tangents):
    def loss(arguments):
      context, lse = run(*arguments)
      return jnp.sum(jnp.sin(context)) + jnp.sum(jnp.cos(lse))

    def tangent(arguments):
      return jax.jvp(loss, (arguments,), (tangents,))[1]

    def product(arguments):
      leaves = map(jax.tree.leaves, (jax.grad(loss)(arguments), tangents))
      return sum(map(jnp.vdot, *leaves))

    value, mixed = jax.value_and_grad(tangent)(arguments)
    if not others:
      return value, mixed
    forward = jax.jvp(jax.grad(loss), (arguments,), (tangents,))[1]
    return value, mixed, forward, jax.grad(product)(arguments)

  with wide():
    arguments = jax.tree.map(lambda x: np.asarray(x, np.float64), given())
    tangents = jax.tree.map(np.cos, arguments)
    mesh = make_mesh(sequence=2)
    options = {"mesh": mesh, "implementation": implementation}
    ring = around(CASES[name], "contiguous", **options)
    compute = jax.jit(derivatives, static_argnums=(0, 1))
    tangent, *got = compute(ring, True, arguments, tangents)
    want, product = compute(alone(CASES[name]), False, arguments, tangents)
    close((tangent, *got), (want, *[product] * 3), rtol=1e-8, atol=1e-9)


@sampled(
  ("name", "implementation"),
  [("causal", None), ("segments", None), ("causal", Pallas(interpret=True))],
  default=[("causal", None)],
)
def test_non_finite_token_of_a_ring_affects_only_rows_that_attend_to_it(
  name, implementation
):
  (query, key, value), parameters = given()
  ring = around(CASES[name], implementation=implementation)
  one = alone(CASES[name])

  @functools.partial(jax.jit, static_argnums=1)
  def results(tokens, run):
    def loss(tokens):
      context, _ = run(tokens, parameters)
      finite = ~jnp.isnan(context)
      return jnp.sum(jnp.where(finite, jnp.sin(context), 0.0)), context

    tangents = jax.tree.map(jnp.cos, [query, key, value])
    tangent = jax.jvp(lambda *each: run(each, parameters), tokens, tangents)[1]
    return *jax.grad(loss, has_aux=True)(tokens), tangent

  for number in (jnp.nan, jnp.inf):
    tokens = [
      query.at[0, :, 3].set(number),
      key.at[0, :, 8, 2].set(number),
      value.at[1, :, 20].set(number),
    ]
    got, want = (results(tokens, run) for run in (ring, one))
    close(got[1], want[1], rtol=1e-5, atol=1e-6)
    assert 0 < np.isnan(want[1]).mean() < 1
    assert all(np.isfinite(each).all() for each in want[0])
    close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["causal", "own"])
def test_without_check_vma(name):
  check(around(CASES[name], check=False), alone(CASES[name]), *given())


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", [None, Pallas(interpret=True)])
def test_dropout_equals_that_of_one_device(implementation):
  options = {"dropout_rate": 0.5, "rng": jax.random.key(3)}

  def dropping(arguments_of):
    return lambda parameters: {**arguments_of(parameters), **options}

  case = dropping(CASES["causal"])
  check(around(case, implementation=implementation), alone(case), *given())


@pytest.mark.exhaustive
def test_a_mesh_with_a_second_axis_and_grouped_heads():
  mesh = make_mesh(data=2, sequence=4)
  spec = PartitionSpec("data", None, None, "sequence")
  (query, _, _), parameters = given()
  key, value = jnp.asarray(draw(2, *[(2, 1, 1, LENGTH, 8)] * 2), jnp.float32)
  query = query[:, None]

  def arguments_of(parameters):
    score = scores.general(parameters["square"])
    return {"mask": masks.causal(), "score": score}

  check(
    around(arguments_of, mesh=mesh, spec=spec),
    alone(arguments_of),
    (query, key, value),
    parameters,
  )


@pytest.mark.exhaustive
def test_queries_and_keys_of_different_lengths():
  (query, key, value), parameters = given()

  def arguments_of(_):
    return {"mask": masks.causal(LENGTH // 2)}

  check(
    around(arguments_of),
    alone(arguments_of),
    (query[:, :, : LENGTH // 2], key, value),
    parameters,
  )


@pytest.mark.exhaustive
def test_half_precision_keeps_its_dtype():
  tokens, parameters = given()
  tokens = [each.astype(jnp.bfloat16) for each in tokens]
  context, lse = around(CASES["causal"])(tokens, parameters)
  assert (context.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
  want, _ = alone(CASES["causal"])(tokens, parameters)
  close(context.astype("f4"), want.astype("f4"), rtol=0.02, atol=0.02)

  def loss(tokens, run):
    return jnp.sum(jnp.sin(run(tokens, parameters)[0].astype("f4")))

  got, want = (
    jax.grad(loss)(tokens, run(CASES["causal"])) for run in (around, alone)
  )
  for one, other in zip(got, want):
    assert one.dtype == jnp.bfloat16
    close(one.astype("f4"), other.astype("f4"), rtol=0.05, atol=0.02)


def test_gradients_in_half_precision_are_summed_in_single():
  """Small gradients of some devices are not rounded away."""
  query = key = value = jnp.zeros((2, 3, LENGTH, 8), jnp.bfloat16)
  # All weights are equal: the cotangent 4 on one of four devices adds 1 to the
  # gradient of a value, the others 0.0037 each, which bfloat16 loses beside 1.
  rows = jnp.repeat(jnp.array([4.0, 0.0148, 0.0148, 0.0148]), LENGTH // 4)
  cotangents = jnp.broadcast_to(rows[:, None], value.shape)

  def loss(value):
    tokens, parameters = [query, key, value], given()[1]
    context, _ = around(lambda p: {}, order="contiguous")(tokens, parameters)
    return jnp.sum(context.astype("f4") * cotangents)

  got = jax.jit(jax.grad(loss))(value).astype("f4")
  close(got, np.full(got.shape, 1.0111), rtol=2**-8)


def test_nan_in_masked_tokens_changes_nothing():
  tokens, parameters = given()
  run = around(CASES["lengths"], mesh=make_mesh(sequence=2))
  want = run(tokens, parameters)
  spoilt = [each.at[:, :, 30:].set(jnp.nan) for each in tokens[1:]]
  got = run([tokens[0], *spoilt], parameters)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_order_balances_causal_work(size):
  cut = Ranges.cut(64, 64 // (2 * size))
  table = visibility(masks.causal(), cut, cut)
  work = [
    sum(
      (table[chunk_of(device, place, size, "zigzag")] == seen).sum()
      for place in (0, 1)
    )
    for seen in (EMPTY, FULL)
    for device in range(size)
  ]
  assert len(set(work[:size])) == len(set(work[size:])) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["forward", "gradient"])
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_each_of_eight_devices_needs_a_sixth_of_the_memory(what, mask):
  shape = (8, 1 << 15, 64)
  spec = PartitionSpec(None, "sequence")
  mesh = make_mesh(sequence=8)

  def temporaries(function, **where):
    tokens = jax.ShapeDtypeStruct(shape, jnp.float32, **where)

    def run(tokens):
      return function(tokens, tokens, tokens, mask=mask)

    made = run if what == "forward" else jax.grad(lambda x: jnp.sum(run(x)))
    compiled = jax.jit(made).lower(tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  def ring(*tokens, mask):
    local = functools.partial(ring_attention, axis_name="sequence", mask=mask)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(
      *tokens
    )

  place = jax.NamedSharding(mesh, spec)
  assert 6 * temporaries(ring, sharding=place) <= temporaries(attend)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_restore_inverts_arrange(order):
  tokens = np.arange(48).reshape(2, 24)
  positions_of_shards = jax.shard_map(
    lambda: ring_positions("sequence", 6, order=order),
    mesh=make_mesh(sequence=4),
    in_specs=(),
    out_specs=PartitionSpec("sequence"),
  )

  @jax.jit
  def run(tokens):
    arranged = arrange(tokens, 4, axis=1, order=order)
    back = restore(arranged, 4, axis=-1, order=order)
    return arranged, back, positions_of_shards()

  arranged, back, positions = run(tokens)
  np.testing.assert_array_equal(back, tokens)
  np.testing.assert_array_equal(positions, arranged[0])


@pytest.mark.parametrize(
  ("queries", "keys", "features"), [(0, 8, 3), (8, 0, 3), (8, 8, 0), (0, 0, 3)]
)
def test_an_empty_axis_gives_what_attend_gives(queries, keys, features):
  shapes = (queries, 4), (keys, 4), (keys, features)
  tokens = [np.ones(shape, np.float32) for shape in shapes]

  def contexts(function, *tokens):
    return function(*tokens, mask=masks.causal())

  local = functools.partial(
    contexts, functools.partial(ring_attention, axis_name="sequence")
  )
  over_devices = jax.shard_map(
    local,
    mesh=make_mesh(sequence=4),
    in_specs=PartitionSpec("sequence"),
    out_specs=PartitionSpec("sequence"),
  )

  def total(*tokens):
    context = over_devices(*tokens)
    return context.sum(), (context, contexts(attend, *tokens))

  gradients, (found, expected) = jax.jit(
    jax.grad(total, (0, 1, 2), has_aux=True)
  )(*tokens)
  np.testing.assert_allclose(found, expected)
  for gradient in gradients:
    np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


def test_by_default_shards_are_consecutive_parts_of_the_sequence():
  tokens, _ = given()
  local = functools.partial(
    ring_attention, axis_name="sequence", mask=masks.causal()
  )
  run = jax.jit(
    jax.shard_map(
      local, mesh=make_mesh(sequence=4), in_specs=HEADS, out_specs=HEADS
    )
  )
  want = alone(CASES["causal"])(tokens, {})[0]
  close(run(*tokens), want, rtol=1e-4, atol=1e-5)


def plain(parameters):
  weight = parameters["square"]
  return {"score": lambda query, key: manhattan(weight, query, key)}


@pytest.mark.parametrize(
  ("arguments_of", "message"),
  [
    (lambda p: {"mask": jnp.ones((3, 32), bool)}, "axis -2 must be 1 or 32"),
    (plain, "a plain function cannot capture replicated arrays"),
  ],
)
def test_errors_name_the_cause(arguments_of, message):
  run = around(arguments_of)
  with pytest.raises(ValueError, match=message):
    run(*given())


@pytest.mark.exhaustive
def test_plain_function_may_capture_arrays_without_check_vma():
  check(around(plain, check=False), alone(plain), *given())


def test_an_unknown_implementation_raises():
  run = around(CASES["causal"], implementation="fastest")
  with pytest.raises(ValueError, match="implementation must be"):
    run(*given())


def test_a_value_of_another_length_than_the_key_raises():
  (query, key, value), parameters = given()
  with pytest.raises(AssertionError, match=r"value has shape .* to fit key"):
    around(CASES["causal"])((query, key, value[:, :, :16]), parameters)


def test_an_unknown_order_raises():
  with pytest.raises(ValueError, match="must be 'zigzag' or 'contiguous'"):
    arrange(jnp.ones(8), 2, axis=0, order="spiral")


def test_a_shard_that_does_not_divide_raises():
  tokens, parameters = given()
  tokens = [each[:, :, :20] for each in tokens]
  with pytest.raises(ValueError, match="does not divide into 8 equal pieces"):
    around(CASES["causal"])(tokens, parameters)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_the_axis_of_a_vmap(implementation):
  tokens = jax.random.normal(jax.random.key(0), (3, 2, 8, 4), jnp.float32)
  options = {"mask": masks.causal(), "implementation": implementation}

  def ring(*tokens):
    shards = jax.vmap(
      lambda *shard: ring_attention(*shard, axis_name="shards", **options),
      axis_name="shards",
    )(*(x.reshape(2, 2, 4, 4).swapaxes(0, 1) for x in tokens))
    return shards.swapaxes(0, 1).reshape(2, 8, 4)

  def whole(*tokens):
    return attend(*tokens, **options)

  def value_and_gradients(function):
    def loss(tokens):
      context = function(*tokens)
      return jnp.sum(context**2), context

    return jax.value_and_grad(loss, has_aux=True)(tokens)

  got, want = jax.jit(
    lambda: [value_and_gradients(each) for each in (ring, whole)]
  )()
  close(got, want, rtol=1e-4, atol=1e-5)
