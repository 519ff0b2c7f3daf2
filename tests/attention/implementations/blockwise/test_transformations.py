"""Blockwise equals the reference under every transformation of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention import additive_score, attend, biases, masks, scores
from tests.attention.comparison import SMALL, close, outcome, wide
from tests.attention.oracle import CASES, draw, draw_parameters
from tests.matrix import sampled

# One score of each kind: a product, a loop over channels, a function.
KINDS = ("scaled_dot", "additive", "closure")


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


@sampled("mapped", [*inputs(), "everything"], default=["everything"])
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharded", ["query", "key", "score_weight"])
def test_shard_map_of_an_additive_score_that_loops_over_channels(sharded):
  mesh = Mesh(np.array(jax.devices()), ("batch",))
  size = 68  # 68 ** 3 elements exceed the limit for all channels at once
  drawn = draw(12, (8, size, size), (8, size, size), (8, size))
  arrays = dict(zip(("query", "key", "score_weight"), drawn))
  arrays = {
    name: array if name == sharded else array[:1]
    for name, array in arrays.items()
  }
  specs = {
    name: PartitionSpec("batch" if name == sharded else None) for name in arrays
  }

  def score(arrays):
    weight = jnp.eye(size) / size
    return additive_score(
      **arrays, query_weight=weight, key_weight=weight[:, ::-1]
    )

  run = jax.shard_map(
    score, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("batch")
  )

  def gradient(function):
    loss = lambda arrays: jnp.sum(jnp.sin(function(arrays)))  # noqa: E731
    return jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, arrays))

  with wide():
    close(gradient(run), gradient(score))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
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


@sampled("name", KINDS, default=["scaled_dot"])
def test_within_scan_and_checkpoint(name):
  with wide():
    (queries, key, value) = draw(7, (3, 5, 4), (7, 4), (7, 2))
    parameters = draw_parameters(CASES[name], 4)

    def run(implementation, *, loop):
      @(jax.checkpoint if loop else jax.jit)
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

    want = run("reference", loop=False)
    for implementation in (SMALL, "reference"):
      close(run(implementation, loop=True), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
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
