"""Tiles: which exist, their visibility under masks, dropout in them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
from attention import masks, normalizers, scores
from attention.implementations.blockwise import Blockwise, tile_sizes
from attention.implementations.blockwise import implementation as blockwise
from attention.implementations.blockwise.tiles import Tiling
from attention.masks.tile_visibility import Ranges, visibility
from attention.masks.types import as_mask
from attention.positional.base import EMPTY, FULL, PARTIAL
from attention.positional.position_arrays import positions
from attention.request import make_request
from tests.attention.comparison import close, jitted
from tests.attention.oracle import draw, single
from tests.matrix import sampled, sampled_product

attend = jitted(attention.attend)
SMALL = Blockwise(query_block=2, key_block=3, leading_block=1)
seldom = functools.partial(settings, deadline=None, derandomize=True)


@seldom(max_examples=50)
@given(data=st.data())
def test_rows_columns_and_pairs_visit_every_visible_tile_once(data):
  rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
  leading, block = data.draw(
    st.sampled_from([((), ()), ((6,), (2,)), ((2, 3), (1, 3)), ((1,), (1,))])
  )
  generator = np.random.default_rng(data.draw(st.integers(0, 99)))
  kinds = generator.integers(0, 3, (rows, columns)).astype(np.int8)
  tiling = Tiling(leading, block, 3, 5, kinds)
  expected = {
    (*(b * n for b, n in zip(block, index)), 3 * row, 5 * column)
    for index in np.ndindex(*(n // b for n, b in zip(leading, block)))
    for row, column in np.argwhere(kinds != EMPTY)
  }
  pairs = [tuple(map(int, pair)) for pair in tiling.visible_tiles()]
  assert len(pairs) == len(expected)
  assert set(pairs) == expected

  starts, bounds = tiling.columns()
  visited = []
  for row, (first, middle, last) in zip(tiling.rows(), bounds, strict=True):
    number = row[-1] // 3
    for kind, part in (
      (FULL, starts[first:middle]),
      (PARTIAL, starts[middle:last]),
    ):
      assert (kinds[number, part // 5] == kind).all()
      visited += [(*map(int, row), int(column)) for column in part]
  assert len(visited) == len(expected)
  assert set(visited) == expected
  for kind, (count, most) in zip((FULL, PARTIAL), tiling.visits):
    counts = (kinds == kind).sum(axis=1)
    assert count == (counts[0] if len(set(counts)) == 1 else None)
    assert most == counts.max()


def simple_masks(generator, rows, columns):
  """One of each kind of mask, with numbers where something happens."""
  longest = max(rows, columns)
  number = functools.partial(generator.integers, -2, longest + 2)
  ids = np.sort(generator.integers(0, 4, (2, longest)))
  unsorted = generator.integers(0, 2, (2, longest))
  random = generator.random((rows, columns))
  blocks = np.kron(random[::3, ::3] < 0.5, np.ones((3, 3), bool))
  return [
    masks.causal(int(number())),
    masks.causal(jnp.asarray(number(size=2))),
    masks.sliding_window(int(number()), int(number())),
    masks.sliding_window(jnp.asarray(number(size=2)), None),
    masks.prefix(int(number())),
    masks.padding(jnp.asarray(number(size=2))),
    masks.segments(ids[0, :rows], ids[1, :columns]),
    masks.segments(ids[:, :rows], ids[:, :columns]),
    masks.segments(unsorted[0, :rows], unsorted[1, :columns]),
    masks.segments(jnp.zeros((2, 1), int), ids[:, :columns]),
    as_mask(random < generator.random()),
    as_mask(blocks[:rows, :columns]),
    as_mask(generator.random((2, 1, columns)) < generator.random()),
  ]


def drawn_mask(data, generator, rows, columns, depth=2):
  how = data.draw(st.sampled_from(["plain", "&", "|", "~", "shift", "group"]))
  if depth and how in "&|~":
    left, right = (
      drawn_mask(data, generator, rows, columns, depth - 1) for _ in range(2)
    )
    return {"&": left & right, "|": left | right, "~": ~left}[how]
  shift = data.draw(st.integers(0, 3)) if how == "shift" else 0
  choices = simple_masks(generator, rows + shift, columns)
  mask = choices[data.draw(st.integers(0, len(choices) - 1))]
  mask = mask.grouped(2, 1) if how == "group" else mask
  return mask.shifted(shift) if how == "shift" else mask


@pytest.mark.exhaustive
@seldom(max_examples=80)
@given(data=st.data())
def test_full_and_empty_tiles_are_full_and_empty(data):
  length, key_length = (data.draw(st.integers(1, 12)) for _ in range(2))
  size, key_size = (data.draw(st.integers(1, 5)) for _ in range(2))
  generator = np.random.default_rng(data.draw(st.integers(0, 999)))
  mask = drawn_mask(data, generator, length, key_length)
  rows, columns = Ranges.cut(length, size), Ranges.cut(key_length, key_size)
  kinds = visibility(mask, rows, columns)
  assert kinds.shape == (len(rows), len(columns))
  dense = np.asarray(mask.block(positions(length), positions(key_length), 3))
  dense = np.broadcast_to(dense, (*dense.shape[:-2], length, key_length))
  for kind, tile in tiles_of(kinds, dense, size, key_size):
    assert kind in (EMPTY, PARTIAL, FULL)
    assert kind != FULL or tile.all()
    assert kind != EMPTY or not tile.any()


def tiles_of(kinds, dense, size, key_size):
  for (row, column), kind in np.ndenumerate(kinds):
    rows, columns = row * size, column * key_size
    yield (kind, dense[..., rows : rows + size, columns : columns + key_size])


IDS = np.repeat(np.arange(4), [5, 3, 7, 2])


@pytest.mark.parametrize(
  "mask",
  [
    masks.causal(),
    masks.causal(3),
    masks.sliding_window(4, 1),
    masks.sliding_window(0, 0),
    masks.prefix(6),
    masks.padding(6),
    masks.segments(IDS, IDS),
    masks.segments(jnp.asarray(IDS)[None], jnp.asarray(IDS)[None]),
    masks.causal().shifted(2),
    ~masks.causal(),
    as_mask(np.tri(17, dtype=bool)),
  ],
)
@pytest.mark.parametrize(
  ("size", "key_size"), [(4, 4), (3, 5), (1, 1), (17, 4)]
)
def test_empty_and_full_tiles_are_found(mask, size, key_size):
  kinds = visibility(mask, Ranges.cut(17, size), Ranges.cut(17, key_size))
  dense = np.asarray(mask.materialize(17, 17)).reshape(17, 17)
  for kind, tile in tiles_of(kinds, dense, size, key_size):
    assert kind == (
      EMPTY if not tile.any() else FULL if tile.all() else PARTIAL
    )


@sampled_product(
  ("name", "offset"),
  (["segments", "array"], [-2, 3, 9]),
  default=[("segments", 3), ("array", -2)],
)
def test_shift_beyond_an_array_reads_its_edge(name, offset):
  ids = jnp.arange(5) // 2
  mask = masks.segments(ids, ids)
  if name == "array":
    mask = as_mask(np.asarray(mask.materialize(5, 5)))
  mask = mask.shifted(offset)
  (tokens,) = single(1, (5, 4))
  close(
    attend(tokens, tokens, tokens, mask=mask, implementation=SMALL),
    attend(tokens, tokens, tokens, mask=mask, implementation="reference"),
    rtol=1e-6,
    atol=1e-6,
  )


def test_tiles_without_a_common_segment_are_skipped_at_run_time():
  visited = []

  def score(query, key):
    scores = query @ key.T
    jax.debug.callback(lambda _: visited.append(1), scores)
    return scores

  def loss(tokens, ids, implementation):
    context = attend(
      tokens,
      tokens,
      tokens,
      score=score,
      mask=masks.causal() & masks.segments(ids, ids).shifted(0),
      implementation=implementation,
    )
    return jnp.sum(jnp.sin(context))

  (tokens,) = single(0, (12, 4))
  gradient = jax.jit(jax.value_and_grad(loss), static_argnums=2)
  ids = jnp.asarray([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2])
  visits = {}
  # The second has the tiles (0, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3).
  for tiles, own in ((10, jnp.zeros_like(ids)), (6, ids)):
    visited.clear()
    got = gradient(tokens, own, Blockwise(query_block=3, key_block=3))
    jax.effects_barrier()
    visits[tiles] = len(visited)
  assert visits[6] / 6 == visits[10] / 10 > 1  # forward and backward
  want = gradient(tokens, ids, "reference")
  close(got, want, rtol=1e-5, atol=1e-5)


@sampled("transform", ["vmap", "hessian", "heads"], default=[])
def test_traced_segments_under_transformations(transform):
  tokens = jnp.stack(single(0, *[(2, 7, 4)] * 3))
  weight = jnp.eye(4) + 0.1
  ids = jnp.asarray([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 3]])

  def run(weight, tokens, ids, implementation):
    if transform == "heads":
      tokens, ids = jnp.stack([tokens, tokens], 1)[:, None], ids[None]

    def loss(weight, tokens):
      context = attend(
        *tokens,
        score=lambda query, key: query @ weight @ jnp.swapaxes(key, -1, -2),
        mask=masks.segments(ids, ids) | masks.segments(ids - 3, ids),
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(context))

    if transform == "hessian":
      _, tangent = jax.jvp(jax.grad(loss), (weight, tokens), (weight, tokens))
      return tangent
    return jax.grad(loss, (0, 1))(weight, tokens)

  mapped = jax.vmap(run, (None, 1, 0, None)) if transform == "vmap" else run
  function = jax.jit(mapped, static_argnums=3)
  close(
    function(weight, tokens, ids, SMALL),
    function(weight, tokens, ids, "reference"),
    rtol=1e-4,
    atol=1e-4,
  )


MASKS_OF_A_NUMBER = [
  lambda number: masks.causal(number),
  lambda number: masks.sliding_window(number, 1),
  lambda number: masks.prefix(number),
  lambda number: masks.padding(jnp.stack([number, number + 2])),
  lambda number: masks.segments(jnp.arange(5) // number, jnp.arange(7) // 2),
  lambda number: jnp.arange(7)[None] < number,
  lambda number: ~(masks.causal(number) & masks.prefix(4)) | masks.prefix(1),
  lambda number: masks.causal().shifted(number),
]


@sampled("mask_of", MASKS_OF_A_NUMBER, default=MASKS_OF_A_NUMBER[3:7:3])
def test_traced_mask_parameters_equal_known_ones(mask_of):
  query, key, value = single(1, (2, 5, 4), (2, 7, 4), (2, 7, 2))

  def run(number):
    return attend(query, key, value, mask=mask_of(number), implementation=SMALL)

  traced = jax.jit(run)
  for number in (1, 6):
    close(
      traced(number),
      attend(
        query,
        key,
        value,
        mask=mask_of(jnp.asarray(number)),
        implementation="reference",
      ),
      rtol=1e-6,
      atol=1e-6,
    )


MASKS_OF_ARRAYS = [
  masks.padding(jnp.asarray([3, 6])),
  masks.causal(jnp.asarray([0, 2])),
  masks.sliding_window(jnp.asarray(1), jnp.asarray(2)),
  masks.segments(jnp.arange(5) // 2, jnp.arange(7) // 2),
  as_mask(jnp.tri(5, 7, dtype=bool)),
  masks.causal().shifted(jnp.asarray(2)),
]


@sampled("mask", MASKS_OF_ARRAYS, default=MASKS_OF_ARRAYS[:5:4])
def test_jit_may_capture_a_mask_of_arrays(mask):
  tokens = single(9, (2, 5, 4), (2, 7, 4), (2, 7, 2))
  run = functools.partial(attend, mask=mask, implementation=SMALL)
  close(
    jax.jit(lambda *tokens: run(*tokens))(*tokens),
    attend(*tokens, mask=mask, implementation="reference"),
    rtol=1e-5,
    atol=1e-6,
  )


@sampled(
  "blocks",
  [(2, 3, 1), (5, 7, None), (3, 2, 2), (1, 1, 4), (4, 16, 2)],
  default=[(5, 7, None)],
)
def test_dropout_equals_bernoulli_for_all_tile_sizes(blocks):
  query, key = single(3, (2, 3, 5, 4), (2, 1, 7, 4))
  rng = jax.random.key(11)
  run = functools.partial(attend, implementation=Blockwise(*blocks))
  weights = run(query, key, jnp.eye(7))
  dropped = run(query, key, jnp.eye(7), dropout_rate=0.4, rng=rng)
  kept = jax.random.bernoulli(rng, 0.6, weights.shape)
  close(dropped, jnp.where(kept, weights / 0.6, 0.0), rtol=1e-5, atol=1e-7)


def test_dropout_differs_along_leading_axes_of_values():
  query, key, value = single(4, (5, 4), (7, 4), (2, 7, 7))
  rng = jax.random.key(12)
  arguments = {"dropout_rate": 0.5, "rng": rng, "mask": masks.causal(2)}
  close(
    attend(query, key, value, implementation=SMALL, **arguments),
    attend(query, key, value, implementation="reference", **arguments),
    rtol=1e-5,
    atol=1e-6,
  )


def test_derivatives_use_the_same_dropout_mask():
  with jax.enable_x64(True):
    point, direction = (
      tuple(map(jnp.asarray, draw(seed, (2, 5, 4), (2, 7, 4), (2, 7, 3))))
      for seed in (5, 6)
    )

    def derivatives(implementation):
      def loss(*tokens):
        context = attend(
          *tokens,
          mask=masks.causal(2),
          dropout_rate=0.4,
          rng=jax.random.key(13),
          implementation=implementation,
        )
        return jnp.sum(jnp.sin(context)), context

      def both(*point):
        gradient = jax.grad(loss, (0, 1, 2), has_aux=True)
        return jax.jvp(lambda *point: gradient(*point), point, direction)

      return jax.jit(both)(*point)

    close(derivatives(SMALL), derivatives("reference"), rtol=1e-9, atol=1e-12)


@sampled("name", ["scaled_dot", "additive", "each head"], default=["each head"])
def test_leading_axes_are_cut_on_a_single_cpu_device(name, monkeypatch):
  query, key, value, weight = single(
    30, (3, 4, 6, 2), (3, 4, 7, 2), (3, 4, 7, 2), (4, 2)
  )
  score = {
    "scaled_dot": scores.scaled_dot(),
    "additive": scores.additive(jnp.eye(2), jnp.eye(2), weight[0]),
    "each head": scores.additive(jnp.eye(2), jnp.eye(2), weight),
  }[name]
  monkeypatch.setattr(tile_sizes, "_devices_of_a_cpu", lambda: 1)
  monkeypatch.setattr(tile_sizes, "_CPU", tile_sizes.Limits(512, 128, 128, 1))
  mask = masks.causal()
  blocks = []
  trace_pair = blockwise.trace_pair

  def spy(*arguments):
    pair, tiling = trace_pair(*arguments)
    blocks.append(tiling.block)
    return pair, tiling

  monkeypatch.setattr(blockwise, "trace_pair", spy)
  got, want = (
    attend(
      query, key, value, score=score, mask=mask, implementation=implementation
    )
    for implementation in ("blockwise", "reference")
  )
  np.testing.assert_allclose(got, want, atol=1e-5)
  block = {"scaled_dot": (1, 2), "additive": (1, 1)}.get(name, (1, 4))
  # The tiles of CPUs come first, then those of accelerators.
  assert blocks == [block, (3, 4)]


def test_blocks_of_a_normalizer_are_smaller_on_cpus(monkeypatch):
  monkeypatch.setattr(tile_sizes, "_devices_of_a_cpu", lambda: 1)
  tokens = [jnp.ones((16, *core)) for core in ((128, 8), (512, 8), (512, 8))]
  request = make_request(
    *tokens, score=scores.dot(), normalizer=normalizers.entmax()
  )
  variants = {
    Blockwise().variant(dataclasses.replace(request, branch=platform))
    for platform in ("cpu", "tpu", "cuda")
  }
  assert variants == {(128, 512, ((8,), (16,))), (128, 512, ((16,),))}


def test_an_empty_axis_of_values_under_jit():
  query, key = jnp.ones((1, 3, 4)), jnp.ones((1, 3, 4))
  compute = jax.jit(functools.partial(attend, implementation="blockwise"))
  assert compute(query, key, jnp.ones((0, 3, 4))).shape == (0, 3, 4)


@pytest.mark.parametrize(
  ("platform", "length", "expected"),
  [
    ("tpu", 4096, 1024),  # and not 1376, with tokens padded to 4128
    ("tpu", 1408, 1408),
    ("tpu", 5000, 1264),  # no multiple of 128 divides it
    ("cuda", 4096, 1376),
    ("cpu", 4096, 352),
  ],
)
def test_tiles_of_tpus_divide_the_length(platform, length, expected):
  limits = tile_sizes.limits(platform)
  assert limits.side(length, None, 8) == expected
