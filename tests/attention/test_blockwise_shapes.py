"""Blockwise equals the reference, whatever the shapes and transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention import attend, biases, masks, scores
from attention.blockwise import Blockwise
from tests.attention.oracle import CASES, draw, draw_parameters

SMALL = Blockwise(query_block=2, key_block=3, leading_block=2)
every_score = pytest.mark.parametrize("name", CASES)
wide = functools.partial(jax.enable_x64, True)


def close(got, want, rtol=1e-9, atol=1e-11):
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(
      *(np.asarray(each, np.float64) for each in (got, want)), rtol, atol
    ),
    got,
    want,
  )


def outcome(point, name, implementation, arguments=lambda bias: {}):
  """Context, lse and the gradients of everything in `point`."""

  def loss(point):
    context, lse = attend(
      *point["tokens"],
      score=CASES[name].bound(point["parameters"]),
      implementation=implementation,
      return_lse=True,
      **arguments(point.get("bias")),
    )
    seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(jnp.sin(context)) + jnp.sum(seen**2), (context, lse)

  return jax.jit(jax.grad(loss, has_aux=True))(point)


# Leading axes of query, key and value; the rank that masks see, and its axes.
LEADING = [
  ((), (), ()),
  ((2,), (2,), (2,)),
  ((2,), (1,), (2,)),
  ((), (2,), (3, 1)),
  ((2, 2, 3), (2, 2, 1), (2, 2, 1)),  # [B, K, G] against [B, K, 1]
  ((2, 1, 3), (1, 2, 1), (2, 2, 3)),
  ((4, 1), (1, 1), (4, 3)),
]


def drawn_mask(draw_from, generator, batch, rank, length, key_length):
  number = lambda: int(generator.integers(0, 8))  # noqa: E731
  lengths = jnp.asarray(generator.integers(0, 8, batch if rank else ()))
  ids = jnp.asarray(np.sort(generator.integers(0, 3, key_length)))
  own = jnp.asarray(np.sort(generator.integers(0, 3, length)))
  choices = {
    "none": lambda: None,
    "causal": lambda: masks.causal(number() - 2),
    "shifted": lambda: masks.causal().shifted(number()),
    "window": lambda: masks.sliding_window(number(), number() - 2),
    "prefix": lambda: masks.causal() | masks.prefix(number()),
    "padding": lambda: masks.padding(lengths),
    "batch": lambda: masks.causal(lengths) & ~masks.prefix(1),
    "segments": lambda: masks.segments(own, ids),
    "array": lambda: (
      masks.causal(2)
      & jnp.asarray(generator.random((length, key_length)) < 0.7)
    ),
    "column": lambda: jnp.asarray(generator.random((length, 1)) < 0.7),
  }
  return choices[draw_from(st.sampled_from(list(choices)))]()


def drawn_bias(draw_from, generator, heads, length, key_length):
  kind = draw_from(st.sampled_from(["none", "array", "holes", "alibi", "t5"]))
  shape = (heads, length, key_length)
  if kind == "holes":
    bias = generator.normal(size=(length, key_length))
    return np.where(generator.random(bias.shape) < 0.3, -np.inf, bias), None
  if kind == "t5":
    table = generator.normal(size=(8, heads))
    return table, lambda table: biases.relative_position(table, max_distance=9)
  if kind == "alibi":
    return generator.normal(
      size=(1, key_length)
    ), lambda bias: biases.alibi(heads) + bias
  return (generator.normal(size=shape) if kind == "array" else None), None


@every_score
# Shrinking would compile hundreds of times.
@settings(
  max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate]
)
@given(data=st.data())
def test_equals_the_reference(name, data):
  lengths = st.sampled_from([1, 2, 5, 7, 11, 13])
  length, key_length = data.draw(lengths), data.draw(lengths)
  leading = data.draw(st.sampled_from(LEADING))
  block = st.sampled_from([1, 2, 3, 5, 16, None])
  implementation = Blockwise(*(data.draw(block) for _ in range(3)))
  dtype = data.draw(
    st.sampled_from(["float64", "float64", "float32", "bfloat16", "float16"])
  )
  generator = np.random.default_rng(data.draw(st.integers(0, 99)))
  everything = np.broadcast_shapes(*leading)
  rank = len(everything)
  with wide():
    mask = drawn_mask(
      data.draw, generator, everything[:1], rank, length, key_length
    )
    heads = everything[-1] if rank else 0
    bias, make_bias = (None, None)
    if heads:
      bias, make_bias = drawn_bias(
        data.draw, generator, heads, length, key_length
      )
    sizes = ((length, 3), (key_length, 3), (key_length, 2))
    tokens = draw(1, *(own + size for own, size in zip(leading, sizes)))
    point = {"tokens": tokens, "parameters": draw_parameters(CASES[name], 3)}
    if bias is not None:
      point["bias"] = bias
    point = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), point)

    def arguments(bias):
      made = make_bias(bias) if make_bias else bias
      return {"mask": mask, "bias": made}

    got, want = (
      outcome(point, name, each, arguments)
      for each in (implementation, "reference")
    )
    tolerance = {"float64": 1e-9, "float32": 2e-4}.get(dtype, 0.1)
    close(got, want, tolerance, tolerance if dtype != "float64" else 1e-10)
    same = jax.tree.map(lambda got, want: got.dtype == want.dtype, got, want)
    assert all(jax.tree.leaves(same))


@every_score
@pytest.mark.parametrize(
  "lengths", [(1, 1), (1, 5), (5, 1), (3, 0), (0, 3), (0, 0)]
)
def test_one_token_or_none(name, lengths):
  length, key_length = lengths
  with wide():
    tokens = draw(2, (2, length, 3), (2, key_length, 3), (2, key_length, 2))
    point = {"tokens": tokens, "parameters": draw_parameters(CASES[name], 3)}
    mask = {"mask": masks.causal()}
    close(
      *(
        outcome(point, name, each, lambda bias: mask)
        for each in (SMALL, "reference")
      )
    )


@pytest.mark.parametrize(
  "shapes",
  [
    ((0, 3, 4), (0, 5, 4), (0, 5, 2)),  # no batch entries
    ((3, 4), (5, 4), (5, 0)),  # values without features
    ((3, 0), (5, 0), (5, 2)),  # keys without features
  ],
)
def test_axes_of_size_zero(shapes):
  with wide():
    point = {"tokens": draw(3, *shapes), "parameters": {}}
    for arguments in ({}, {"mask": masks.causal()}):
      close(
        *(
          outcome(point, "scaled_dot", each, lambda bias, a=arguments: a)
          for each in (SMALL, "reference")
        )
      )


def inputs():
  """Arguments that can be mapped over or sharded, with an axis of 8 each."""
  query, key, value, bias = draw(4, (8, 3, 4), (8, 5, 4), (8, 5, 2), (8, 3, 5))
  weight, rng = draw(5, (8, 4))[0], jax.random.split(jax.random.key(1), 8)
  return {
    "query": query,
    "key": key,
    "value": value,
    "length": np.arange(8),
    "bias": bias,
    "weight": weight,
    "rng": rng,
  }


def of_inputs(implementation, query, key, value, length, bias, weight, rng):
  """Attention of one entry, or of one of a batch axis, of everything."""
  score = scores.additive(jnp.eye(4), jnp.eye(4), weight)
  return attend(
    query,
    key,
    value,
    score=score,
    mask=masks.padding(length),
    bias=bias,
    dropout_rate=0.5,
    rng=rng,
    implementation=implementation,
    return_lse=True,
  )


def loss_and_outputs(run, arrays):
  def loss(floating):
    context, lse = run({**arrays, **floating})
    seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(jnp.sin(context)) + jnp.sum(seen), (context, lse)

  names = ("query", "key", "value", "bias", "weight")
  gradient = jax.jit(jax.grad(loss, has_aux=True))
  return gradient({name: jnp.asarray(arrays[name]) for name in names})


def test_a_mask_and_a_bias_may_have_axes_that_only_values_have():
  with wide():
    tokens = draw(9, (4, 1, 5, 4), (1, 1, 7, 4), (4, 3, 7, 2))
    (bias,) = draw(10, (3, 5, 7))
    point = {"tokens": tokens, "parameters": {}, "bias": bias}
    lengths = jnp.arange(12).reshape(4, 3)
    for own in (
      lambda bias: {"bias": bias},
      lambda bias: {"mask": masks.padding(lengths)},
      lambda bias: {"mask": masks.padding(lengths), "bias": bias},
    ):
      implementations = (SMALL, "blockwise", "reference")
      *got, want = (
        outcome(point, "scaled_dot", each, own) for each in implementations
      )
      for each in got:
        close(each, want)


@pytest.mark.parametrize("mapped", [*inputs(), "everything"])
def test_vmap_over_any_argument(mapped):
  def outcome(implementation):
    arrays = inputs()
    alone = lambda name: mapped not in (name, "everything")  # noqa: E731
    single = {n: a[3] if alone(n) else a for n, a in arrays.items()}
    axes = {name: None if alone(name) else 0 for name in arrays}
    one = functools.partial(of_inputs, implementation)
    run = jax.vmap(lambda arrays: one(**arrays), in_axes=(axes,))
    return loss_and_outputs(run, single)

  with wide():
    close(outcome(SMALL), outcome("reference"))


@pytest.mark.parametrize("sharded", [*inputs(), "everything"])
def test_shard_map_with_any_argument_sharded(sharded):
  mesh = Mesh(np.array(jax.devices()), ("batch",))
  assert mesh.size == 8

  def outcome(implementation):
    arrays = inputs()
    alone = lambda name: sharded not in (name, "everything")  # noqa: E731
    arrays = {n: a[3:4] if alone(n) else a for n, a in arrays.items()}
    specs = {
      n: PartitionSpec() if alone(n) else PartitionSpec("batch") for n in arrays
    }

    def one(arrays):
      arrays = {**arrays, "rng": arrays["rng"][0]}
      return of_inputs(implementation, **arrays)

    run = jax.shard_map(
      one, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("batch")
    )
    return loss_and_outputs(run, arrays)

  with wide():
    close(outcome(SMALL), outcome("reference"))


@every_score
def test_sharded_arrays_under_jit(name):
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("batch", "head"))
  with wide():
    tokens = draw(6, (4, 2, 5, 4), (4, 2, 7, 4), (4, 2, 7, 2))
    parameters = draw_parameters(CASES[name], 4)
    arguments = {"mask": masks.causal(2), "bias": biases.alibi(2)}
    sharding = NamedSharding(mesh, PartitionSpec("batch", "head"))
    placed = [jax.device_put(each, sharding) for each in tokens]
    got, want = (
      outcome(
        {"tokens": each, "parameters": parameters},
        name,
        implementation,
        lambda bias: arguments,
      )
      for each, implementation in ((placed, SMALL), (tokens, "reference"))
    )
    close(got, want)


@every_score
def test_within_scan_and_checkpoint(name):
  with wide():
    (queries, key, value) = draw(7, (3, 5, 4), (7, 4), (7, 2))
    parameters = draw_parameters(CASES[name], 4)

    def run(implementation, transform, loop):
      @transform
      def one(query, key, parameters):
        return attend(
          query,
          key,
          value,
          score=CASES[name].bound(parameters),
          mask=masks.causal(1),
          implementation=implementation,
        )

      def loss(queries, key, parameters):
        if not loop:
          return jnp.sum(jnp.sin(one(queries, key, parameters)))

        def step(total, query):
          return total + jnp.sum(jnp.sin(one(query, key, parameters))), None

        return jax.lax.scan(step, 0.0, queries)[0]

      gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
      return gradient(queries, key, parameters)

    want = run("reference", lambda function: function, False)
    close(run(SMALL, jax.checkpoint, True), want)
    close(run(SMALL, lambda function: function, True), want)


@pytest.mark.parametrize("name", ["scaled_dot", "additive", "closure"])
def test_derivatives_to_the_third_order(name):
  with wide():
    tokens = draw(8, (3, 2), (4, 2), (4, 2))
    point = (*tokens, draw_parameters(CASES[name], 2))
    point = jax.tree.map(jnp.asarray, point)
    direction = jax.tree.map(lambda leaf: jnp.cos(3.0 * leaf), point)

    def outcome(implementation):
      def both(*point):
        context, lse = attend(
          *point[:3],
          score=CASES[name].bound(point[3]),
          mask=masks.causal(1),
          implementation=implementation,
          return_lse=True,
        )
        return jnp.sin(context), lse

      def scalar(*point):
        return sum(jnp.sum(leaf**2) for leaf in both(*point))

      def along(function):
        def derivative(*point):
          products = jax.tree.map(
            lambda g, d: jnp.sum(g * d),
            jax.grad(function, (0, 1, 2, 3))(*point),
            direction,
          )
          return sum(jax.tree.leaves(products))

        return derivative

      @jax.jit
      def everything(*point):
        return (
          jax.jacfwd(both, (0, 1, 2))(*point),
          jax.jacrev(both, (0, 1, 2))(*point),
          jax.hessian(scalar, (0, 1, 2))(*point),
          jax.grad(along(along(scalar)), (0, 1, 2, 3))(*point),
        )

      return everything(*point)

    close(outcome(SMALL), outcome("reference"), 1e-8, 1e-9)
