"""The kernel for Hopper GPUs, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import pytest

from attention import attend, biases, masks, scores
from attention.implementations import Pallas
from attention.ring import ring_attention
from tests.attention.implementations.pallas.hopper import (
  CASES,
  INTERPRETED,
  MASKED,
  WIDE,
  additive,
  arrays,
  check,
  close,
  forgetting,
  interpreter,
  outputs,
  params,
  predicting,
  results,
)
from tests.attention.implementations.pallas.test_kernels import later_heads
from tests.matrix import sampled
from tests.meshes import make_mesh


def running(query, key):
  return jnp.cumsum(query, axis=-1) @ key.mT


def scores_of_norms(query, key):
  lengths = jnp.linalg.norm(query, axis=-1)[..., :, None]
  return lengths * jnp.sum(key, axis=-1)[..., None, :]


@sampled("name", [*CASES], default=["additive", "forgetting", "local-p"])
def test_results_and_gradients_equal_the_reference(name):
  """With 50 queries and 100 keys, which are no whole tiles of 64."""
  tokens = arrays((50, 64), (100, 64), (100, 64))
  check(tokens, **CASES[name])


def half_predicting():
  score = predicting()
  weights = score.query_weight, score.position_weight
  return scores.local(score.score, 40.0, *(x.astype("f2") for x in weights))


@sampled(
  "name", ["dot", "general", "cosine", "additive", "local-p"], default=[]
)
def test_float16_tokens(name):
  tokens = arrays((50, 64), (100, 64), (100, 64), dtype=jnp.float16)
  options = {"score": half_predicting()} if name == "local-p" else CASES[name]
  check(tokens, **options)


def test_masked_tokens_under_x64():
  tokens = arrays((10, 64), (70, 64), (70, 64))
  with jax.enable_x64(True):
    check(tokens, **MASKED["cap"])


@pytest.mark.exhaustive
def test_numbers_of_64_bits_under_x64():
  tokens = arrays((2, 50, 64), (2, 100, 64), (2, 100, 64))
  with jax.enable_x64(True):
    check(tokens, **WIDE)


@sampled("name", [*CASES, *MASKED], default=[])
def test_no_races_of_copies_with_computations(name):
  checked = params.InterpretGPUParams(detect_races=True)
  kernels = Pallas(target="hopper", interpret=checked)
  options = (CASES | MASKED)[name]
  tokens = arrays((50, 64), (100, 64), (100, 64))
  jax.block_until_ready(results(kernels, tokens, **options))
  assert not interpreter.get_races().races_found


@sampled("mask", [None, masks.causal(40)], default=[])
# With one reciprocal for two, or not, and with projections in the kernels.
@sampled("channels", [8, 6, 64], default=[8])
def test_additive_scores_of_large_features(channels, mask):
  """Which products of exponentials would exceed."""
  tokens = arrays((10, 64), (100, 64), (100, 64))
  tokens[0] = tokens[0].at[3].multiply(30)
  tokens[1] = tokens[1].at[80].set(-tokens[0][3])  # sums are small again
  options = {"score": additive(channels), "mask": mask}
  check(tokens, **options)


@sampled("name", ["dot", "additive"], default=[])
def test_heads_that_share_keys_sum_their_gradients(name):
  tokens = arrays((2, 3, 10, 64), (2, 1, 70, 64), (1, 3, 70, 64))
  check(tokens, **CASES[name])


@sampled("name", ["lengths", "segments", "alibi", "keys"], default=["alibi"])
@sampled("score", ["dot", "additive"], default=["dot"])
def test_masks_and_biases_with_arrays(name, score):
  lengths = masks.padding(jnp.asarray([70, 0]))
  ids = jnp.arange(70)[None] // jnp.asarray([[20], [33]])
  causal = masks.causal(60)  # for the last of the 70 positions
  options = {
    "lengths": {"mask": lengths},
    "segments": {"mask": masks.segments(ids[:, 60:], ids)},
    "alibi": {"bias": biases.alibi(2), "mask": lengths & causal},
    "keys": {"mask": (ids < 2)[:, None, None]},
  }[name]
  tokens = arrays((2, 2, 10, 64), (2, 2, 70, 64), (2, 2, 70, 64))
  options |= CASES[score]
  check(tokens, **options)


def test_indices_of_leading_axes_that_only_values_have():
  tokens = arrays((2, 4, 64), (2, 6, 64), (2, 2, 6, 64))
  score = scores.modified(scores.dot(), later_heads, with_indices=True)
  check(tokens, outputs, score=score)


class Halved(scores.dot):
  """A dot product with other scores."""

  def pair(self, query, key):
    return 0.5 * super().pair(query, key)


def test_a_class_that_inherits_from_a_dot_product_computes_its_scores():
  tokens = arrays((10, 64), (20, 64), (20, 64))
  check(tokens, outputs, score=Halved())


def test_shards_of_a_mesh_need_types_that_are_not_checked():
  """Of one device: the interpreter of GPUs waits forever on two."""
  mesh = make_mesh(batch=1)
  spec = jax.sharding.PartitionSpec("batch")
  (tokens,) = arrays((2, 64, 64))

  def of_shards(check_vma):
    attention = jax.shard_map(
      lambda tokens: attend(*[tokens] * 3, implementation=INTERPRETED),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
      check_vma=check_vma,
    )
    return jax.jit(attention)(tokens)

  with pytest.raises(NotImplementedError, match="check_vma=False"):
    of_shards(check_vma=True)
  want = outputs("reference", [tokens] * 3)[0]
  close(of_shards(check_vma=False), want)


@sampled("name", ["causal", "cap"], default=[])
def test_kernels_of_a_ring(name):
  """Of one device, as the interpreter has the state of one."""
  mesh = make_mesh(sequence=1)
  options = (CASES | MASKED)[name]
  tokens = arrays((128, 64), (128, 64), (128, 64))

  def gradients(attend, **options):
    def loss(*tokens):
      return jnp.sum(jnp.sin(attend(*tokens, **options).astype(jnp.float32)))

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*tokens)

  def around(*tokens):
    spec = jax.sharding.PartitionSpec("sequence")
    return jax.shard_map(
      lambda *tokens: ring_attention(
        *tokens, axis_name="sequence", implementation=INTERPRETED, **options
      ),
      mesh=mesh,
      in_specs=(spec,) * 3,
      out_specs=spec,
      check_vma=False,
    )(*tokens)

  got = gradients(around)
  want = gradients(attend, implementation="reference", **options)
  jax.tree.map(close, got, want)


@jax.custom_jvp
def distance(numbers):
  """The absolute value, without derivatives."""
  return jnp.abs(numbers)


distance.defjvps(None)


def sum_with_rule(query, key):
  return distance(query[..., :, None, :] - key[..., None, :, :]).sum(-1)


def sum_of_relus(query, key):
  gap = query[..., :, None, :] - key[..., None, :, :]
  return -0.1 * jax.nn.relu(gap).sum(-1)


def test_a_sum_of_relus_has_their_derivative_at_zero():
  tokens = [jnp.round(each) for each in arrays((64, 16), (64, 16), (64, 16))]
  check(tokens, score=sum_of_relus)


def test_what_the_kernel_does_not_support_is_an_error_that_says_why():
  def refused(reason, features=64, dtype=jnp.bfloat16, **options):
    tokens = jnp.ones((2, 8, features), dtype)
    with pytest.raises(NotImplementedError, match=reason):
      attend(tokens, tokens, tokens, implementation=INTERPRETED, **options)

  refused("the operation cumsum", score=running)
  refused("one sum over the features", score=scores_of_norms)
  refused("a derivative rule of its own", score=sum_with_rule)
  refused("bfloat16 or float16", dtype=jnp.float32)
  refused("a multiple of 16", features=40)
  refused("by position that are shifted", score=forgetting().shifted(3))
