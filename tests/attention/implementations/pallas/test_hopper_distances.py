"""Numbers by distance in the kernels for Hopper GPUs, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, scores
from attention.implementations.pallas.hopper.block import memory
from attention.implementations.pallas.hopper.tiles import look_up
from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import TILE, WGMMA
from tests.attention.implementations.pallas.hopper import (
  INTERPRETED,
  additive,
  arrays,
  check,
  check_hidden_tokens,
  close,
  ignore_nan,
  outputs,
  predicting,
  rows_of_nan,
  total,
)
from tests.matrix import sampled


def table(*shape, seed=3, dtype=jnp.float32):
  """Vectors of distances."""
  (numbers,) = arrays(shape, seed=seed)
  return (0.3 * numbers).astype(dtype)


def deberta(size, heads=(), dtype=jnp.float32, **options):
  shape = *heads, size, 64
  tables = table(*shape, dtype=dtype), table(*shape, seed=8, dtype=dtype)
  return scores.disentangled(*tables, **options)


CASES = {
  "shaw": {"score": scores.shaw(table(33, 64))},
  "one distance": {"score": scores.shaw(table(1, 64))},
  "many distances": {"score": scores.shaw(table(127, 64))},
  "shaw of each head": {
    "score": scores.shaw(table(2, 65, 64)),
    "mask": masks.causal(40),
  },
  "shifted": {"score": scores.shaw(table(33, 64)).shifted(20)},
  "disentangled": {"score": deberta(64, heads=(2,))},
  "half": {
    "score": deberta(16, dtype=jnp.bfloat16, as_released=True),
    "mask": masks.causal(40),
  },
  "keys only": {"score": scores.disentangled(None, table(128, 64))},
  "soft cap": {
    "score": scores.soft_cap(deberta(16), 5.0),
    "mask": masks.causal(40),
  },
  "local-p": {"score": predicting(scores.shaw(table(33, 64)), units=64)},
  "disentangled local-p": {
    "score": predicting(deberta(16), units=64),
    "mask": masks.causal(40),
  },
}


# The next test has Shaw's score, one with other features has DeBERTa's.
@sampled("name", [*CASES], default=[])
def test_results_and_gradients_equal_the_reference(name, launched):
  """With tiles whose distances are in the table, at its end, or beyond."""
  tokens = arrays((2, 70, 64), (2, 130, 64), (2, 130, 64))
  check(tokens, **CASES[name])
  # Forward, queries, keys, and the sum of the gradients of tables.
  assert len(launched) == 4


def test_a_block_without_memory_for_remainders_loads_them_later(monkeypatch):
  fits, found = memory.fits, set()

  def limited(held):
    tables = len(held.tables)
    found.add(tables)
    return fits(held) and tables == 0

  monkeypatch.setattr(memory, "fits", limited)
  tokens = arrays((50, 64), (70, 64), (70, 64))
  check(tokens, score=scores.shaw(table(33, 64)))
  assert found == {0, 1}


@sampled("name", ["disentangled"], default=[])
def test_heads_that_share_keys_sum_their_gradients(name):
  tokens = arrays((2, 2, 70, 64), (2, 1, 130, 64), (2, 1, 130, 64))
  options = CASES[name]
  check(tokens, **options)


def test_a_traced_shift():
  tokens = arrays((70, 64), (130, 64), (130, 64))

  def with_shift(implementation, shift):
    score = scores.shaw(table(33, 64)).shifted(shift)
    return outputs(implementation, tokens, score=score)

  with_shift = jax.jit(with_shift, static_argnums=0)
  got, want = (with_shift(each, 20) for each in (INTERPRETED, "reference"))
  jax.tree.map(close, got, want)


@ignore_nan
@sampled("number", ["nan", "inf"], default=["nan"])
@sampled("token", ["query", "key", "value"], default=[])
def test_rows_that_attend_to_nan_are_nan_and_the_others_as_before(
  token, number
):
  tokens = arrays((70, 64), (100, 64), (100, 64))
  assert 0 < rows_of_nan(tokens, token, number, **CASES["half"]) < 70


@pytest.mark.exhaustive
@ignore_nan
def test_numbers_of_hidden_tokens_change_nothing():
  check_hidden_tokens((10, 100, 100), (6, 62), score=deberta(16))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("start", [-64, -20, 3, 40])
def test_the_transpose_of_a_look_up(start, of_rows, sign):
  """<entries(x), y> = <x, transpose(y)>."""
  lines, numbers = draw_tile((24, look_up.LINE)), draw_tile(TILE)
  places = look_up.Places(20, sign, of_rows, start)
  device = Device(interpret=True)
  found = look_up.entries(device, lines, places)
  transposed = Reference(np.zeros_like(lines))
  look_up.put(device, transposed, numbers, places)
  axis = 1 if of_rows else 0
  for place, is_last in ((0, False), (19, True)):
    ends = look_up.at_end(device, numbers, places, is_last=is_last)
    transposed.array[place, :64] += ends.sum(axis)
  np.testing.assert_allclose(
    np.sum(found * numbers), np.sum(lines * transposed.array), rtol=1e-4
  )


def draw_tile(shape):
  return np.asarray(arrays(shape, dtype=jnp.float32)[0])


class Reference:
  """An array that is written."""

  def __init__(self, array):
    self.array = array
    self.shape = array.shape

  def __getitem__(self, place):
    return self.array[place]

  def __setitem__(self, place, numbers):
    self.array[place] = numbers


def test_the_pairs_of_a_thread():
  """Whose rows and columns instructions contain."""
  layout = WGMMA.to_mgpu()
  strides = layout.tiling.tile_strides((TILE[1], 1))
  registers = np.ndindex(layout.registers_shape(TILE))
  numbers = [
    sum(n * stride for n, stride in zip(index, strides)) for index in registers
  ]
  want = [divmod(n + element, TILE[1]) for n in numbers for element in (0, 1)]
  assert [*look_up._offsets()] == want


def results_with_bias(implementation, tokens, table, make, **options):
  """The gradients of tokens and of a table, the context and the lse."""

  def loss(tokens, table):
    context, lse = attend(
      *tokens,
      bias=make(table),
      implementation=implementation,
      return_lse=True,
      **options,
    )
    return total(context, lse), (context, lse)

  return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(tokens, table)


# A bias of a table, the kernels of its gradient, and other arguments. Where a
# bias is scaled, or its heads are grouped, the rule computes the gradient.
BIASES = {
  "T5": (biases.relative_position, 3, {}),
  "causal": (
    lambda table: biases.relative_position(table, max_distance=20),
    *(3, {"mask": masks.causal(40)}),
  ),
  "hides later keys": (
    lambda table: biases.relative_position(table.at[16:].set(-jnp.inf)),
    *(3, {}),
  ),
  "sum": (
    lambda table: biases.alibi(2) + biases.relative_position(table),
    *(3, {"score": scores.soft_cap(scores.scaled_dot(), 5.0)}),
  ),
  # As on the devices of a ring.
  "numbers by distance": (
    lambda table: biases.relative_position(table).by_distance,
    *(4, {}),
  ),
  "scaled": (lambda table: 0.5 * biases.relative_position(table), *(1, {})),
  "additive": (biases.relative_position, *(1, {"score": additive()})),
}


@sampled("name", [*BIASES], default=["scaled"])
def test_biases_by_distance(name, launched):
  tokens = arrays((2, 70, 64), (2, 190, 64), (2, 190, 64))
  (table,) = arrays((32, 2), dtype=jnp.float32)
  make, kernels, options = BIASES[name]
  check(tokens, results_with_bias, table=table, make=make, **options)
  assert len(launched) == kernels


def test_a_bias_by_distance_at_given_positions():
  tokens = arrays((2, 70, 64), (2, 100, 64), (2, 100, 64))
  (table,) = arrays((32, 2), dtype=jnp.float32)
  rows = 3 * jnp.arange(70) - 40
  bias = biases.relative_position(table).at(rows)
  check(tokens, outputs, bias=bias)
