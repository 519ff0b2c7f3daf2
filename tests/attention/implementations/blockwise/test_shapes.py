"""Blockwise equals the reference, whatever the shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attention import biases, masks
from attention.implementations.blockwise import Blockwise
from tests.attention.comparison import SMALL, close, outcome, wide
from tests.attention.oracle import CASES, draw, draw_parameters
from tests.matrix import sampled

every_score = pytest.mark.parametrize("name", CASES)
# One score of each kind: a product, a loop over channels, a function.
KINDS = ("scaled_dot", "additive", "closure")

# Leading axes of query, key and value.
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


# Shrinking would compile hundreds of times.
few_examples = functools.partial(
  settings, deadline=None, derandomize=True, phases=[Phase.generate]
)


@sampled("name", KINDS, default=["additive"])
@few_examples(max_examples=2)
@given(data=st.data())
def test_equals_reference(name, data):
  check_equals_reference(name, data)


@pytest.mark.exhaustive
@every_score
@few_examples(max_examples=8)
@given(data=st.data())
def test_equals_reference_in_many_examples(name, data):
  check_equals_reference(name, data)


def check_equals_reference(name, data):
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


@sampled("name", KINDS, default=["closure"])
@sampled(
  "lengths", [(1, 1), (1, 5), (5, 1), (3, 0), (0, 3), (0, 0)], default=[(1, 5)]
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


@sampled(
  "shapes",
  [
    ((0, 3, 4), (0, 5, 4), (0, 5, 2)),  # no batch entries
    ((3, 4), (5, 4), (5, 0)),  # values without features
    ((3, 0), (5, 0), (5, 2)),  # keys without features
  ],
  default=[((3, 4), (5, 4), (5, 0))],
)
@sampled("mask", [None, masks.causal()], default=[masks.causal()])
def test_axes_of_size_zero(shapes, mask):
  with wide():
    point = {"tokens": draw(3, *shapes), "parameters": {}}
    close(
      *(
        outcome(point, "scaled_dot", each, lambda bias: {"mask": mask})
        for each in (SMALL, "reference")
      )
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["bias", "mask", "both"])
def test_mask_and_bias_may_have_leading_axes_of_values_only(kind):
  with wide():
    tokens = draw(9, (4, 1, 5, 4), (1, 1, 7, 4), (4, 3, 7, 2))
    (bias,) = draw(10, (3, 5, 7))
    point = {"tokens": tokens, "parameters": {}, "bias": bias}
    lengths = jnp.arange(12).reshape(4, 3)

    def arguments(bias):
      both = {"mask": masks.padding(lengths), "bias": bias}
      return both if kind == "both" else {kind: both[kind]}

    implementations = (SMALL, "blockwise", "reference")
    *got, want = (
      outcome(point, "scaled_dot", each, arguments) for each in implementations
    )
    for each in got:
      close(each, want)
