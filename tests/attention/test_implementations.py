"""Implementations of one's own, and how often a score is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, attention_weights, masks
from attention.implementations import Blockwise, Implementation, Reference


class Averaging:
  """Averages the values, without a mask; keeps the requests it received."""

  def __init__(self):
    self.requests = []

  def obstacle(self, request):
    return "has no mask" if request.mask is not None else None

  def __call__(self, request):
    self.requests.append(request)
    context = jnp.mean(request.value, axis=-2, keepdims=True)
    shape = (*request.leading, request.scores_shape[-2], context.shape[-1])
    lse = jnp.zeros(shape[:-1]) if request.return_lse else None
    return jnp.broadcast_to(context, shape), lse


def test_attend_runs_an_implementation_of_ones_own():
  own = Averaging()
  assert isinstance(own, Implementation)
  query, key = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((5, 4))
  value = jnp.arange(10.0).reshape(5, 2)
  context = attend(query, key, value, implementation=own)
  assert context.dtype == jnp.bfloat16
  np.testing.assert_array_equal(context, np.full((2, 3, 2), [4.0, 5.0]))
  _, lse = attend(query, key, value, implementation=own, return_lse=True)
  assert lse.shape == (2, 3)
  first, second = own.requests
  assert first.scores_shape == (2, 3, 5)
  assert (first.return_lse, second.return_lse) == (False, True)


def test_the_obstacle_of_an_implementation_of_ones_own_is_the_error():
  tokens = jnp.ones((3, 4))
  with pytest.raises(NotImplementedError, match="this call: it has no mask"):
    attend(*[tokens] * 3, mask=masks.causal(), implementation=Averaging())


@pytest.mark.parametrize("choice", [Blockwise, "dense", lambda request: None])
def test_what_is_no_implementation_is_refused(choice):
  tokens = jnp.ones((3, 4))
  with pytest.raises(ValueError, match="None, one of 'reference'"):
    attend(*[tokens] * 3, implementation=choice)


@pytest.mark.parametrize("mask", [None, masks.causal(1), masks.padding(7)])
@pytest.mark.parametrize(
  "implementation",
  [None, "reference", Reference(), "blockwise", Blockwise(4, 4, 2)],
  ids=str,
)
def test_a_score_is_called_twice_to_analyse_it_and_once_to_run(
  implementation, mask
):
  calls = []

  def score(query, key):
    calls.append((query.shape, key.shape))
    return query @ key.mT

  def loss(tokens):
    context = attend(
      tokens,
      tokens,
      tokens,
      score=score,
      mask=mask,
      implementation=implementation,
    )
    return context.sum()

  tokens = jnp.ones((2, 3, 9, 4))
  jax.make_jaxpr(jax.grad(loss))(tokens)
  # Two more tell whether tiles may divide the leading axes.
  divides = isinstance(implementation, Blockwise)
  assert len(calls) == (5 if divides else 3)
  assert calls[0] == (tokens.shape, tokens.shape)


def test_a_score_with_arrays_of_each_head_is_called_twice_to_see_them():
  calls, scale = [], jnp.arange(1.0, 7.0).reshape(1, 6, 1, 1)

  def score(query, key):
    calls.append(query.shape)
    return query @ key.mT * scale

  tokens = jnp.ones((2, 6, 9, 4))
  cut = Blockwise(query_block=4, key_block=4, leading_block=3)
  jax.make_jaxpr(
    lambda tokens: attend(*[tokens] * 3, score=score, implementation=cut)
  )(tokens)
  assert len(calls) == 5


def test_attention_weights_call_the_score_three_times():
  calls = []

  def score(query, key):
    calls.append(1)
    return query @ key.mT

  attention_weights(jnp.ones((3, 4)), jnp.ones((5, 4)), score=score)
  assert len(calls) == 3
