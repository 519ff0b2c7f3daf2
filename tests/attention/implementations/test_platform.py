"""Dispatch to cuDNN depends on the platform of the computation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, scores
from attention.implementations.cudnn import kernel as cudnn
from attention.scores.additive_kernel import weighted_tanh_sum
from attention.scores.tracing import trace_score
from tests.attention.oracle import draw
from tests.meshes import make_mesh

MARK = 1234.5


@pytest.fixture(autouse=True)
def _gpu_beside_the_cpu(monkeypatch):
  """JAX's default device seems to be a GPU; arrays are on the CPU."""

  def kernel(query, key, value, *, return_residual, **options):
    context = query * 0.0 + MARK
    lse = context[..., 0].astype(jnp.float32)
    return (context, lse) if return_residual else context

  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(cudnn, "call", kernel)


def half_precision_tokens():
  return draw(0, *[(5, 8)] * 3, dtype=jnp.bfloat16)


def test_concrete_arrays_on_the_cpu_do_not_use_cudnn():
  tokens = half_precision_tokens()
  np.testing.assert_array_equal(
    attend(*tokens), attend(*tokens, implementation="reference")
  )
  gradient = jax.grad(lambda query: attend(query, *tokens[1:]).sum())
  assert (abs(gradient(tokens[0])) < 10.0).all()
  with pytest.raises(NotImplementedError, match="platform is cpu"):
    attend(*tokens, implementation="cudnn")


def test_under_jit_the_lowered_platform_selects_the_implementation():
  tokens = half_precision_tokens()

  @jax.jit
  def value_and_gradients(*tokens):
    loss = lambda *tokens: attend(*tokens).sum()  # noqa: E731
    return attend(*tokens), jax.grad(loss, (0, 1, 2))(*tokens)

  traced = value_and_gradients.trace(*tokens)
  programs = {
    platform: traced.lower(lowering_platforms=(platform,)).as_text()
    for platform in ("cpu", "cuda")
  }
  mark = "1.232000e+03"  # MARK in bfloat16
  assert mark in programs["cuda"]
  assert "exponential" not in programs["cuda"]
  assert mark not in programs["cpu"]
  np.testing.assert_allclose(
    np.asarray(value_and_gradients(*tokens)[0], np.float32),
    np.asarray(attend(*tokens, implementation="reference"), np.float32),
    atol=0.03,
  )


@pytest.mark.parametrize(
  ("length", "loops"),
  [
    (1024, {"cpu"}),
    (2816, {"cpu", "cuda"}),  # 242 MiB of scores, and as many of weights
    (4096, {"cpu", "tpu", "cuda"}),
  ],
)
def test_accelerators_compute_the_dense_formula_while_it_is_small(
  length, loops
):
  tokens = [jax.ShapeDtypeStruct((8, length, 8), jnp.float32)] * 3
  traced = jax.jit(attend).trace(*tokens)
  found = {
    platform
    for platform in ("cpu", "tpu", "cuda")
    if "while" in traced.lower(lowering_platforms=(platform,)).as_text()
  }
  assert found == loops


def test_under_a_mesh_only_the_branch_of_its_platform_is_traced():
  tokens = [jax.ShapeDtypeStruct((8, 1024, 8), jnp.float32)] * 3
  traced = jax.jit(attend).trace(*tokens)
  assert "platform_index" in str(traced.jaxpr)
  with jax.set_mesh(make_mesh(x=1)):
    alone = jax.jit(lambda *tokens: attend(*tokens)).trace(*tokens)
  assert "platform_index" not in str(alone.jaxpr)
  assert "while" in alone.lower().as_text()  # blockwise, as CPUs compute it


def test_a_named_implementation_is_for_the_platform_of_the_mesh():
  tokens = [jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)] * 3

  def trace():
    by_kernels = functools.partial(attend, implementation="pallas")
    return jax.jit(by_kernels).trace(*tokens)

  assert "Ref<gmem>" in str(trace().jaxpr)  # a kernel for GPUs
  with (
    jax.set_mesh(make_mesh(x=1)),
    pytest.raises(NotImplementedError, match="the platform is cpu"),
  ):
    trace()


def test_accelerators_get_larger_tiles_than_cpus():
  tokens = [jax.ShapeDtypeStruct((1, 8192, 8), jnp.float32)] * 3
  attend_blockwise = functools.partial(attend, implementation="blockwise")
  traced = jax.jit(attend_blockwise).trace(*tokens)
  programs = {
    platform: traced.lower(lowering_platforms=(platform,)).as_text()
    for platform in ("cpu", "tpu")
  }
  assert "512x512xf32" in programs["cpu"]
  assert "512x512xf32" not in programs["tpu"]
  assert "4096x4096xf32" in programs["tpu"]


def test_complex_sums_of_additive_scores_are_for_cpus_only():
  tokens = [jax.ShapeDtypeStruct((128, 32), jnp.float32)] * 2
  weight = jax.ShapeDtypeStruct((32,), jnp.float32)

  def total(query, key, weight):
    return weighted_tanh_sum(query, key, weight).sum()

  traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(*tokens, weight)
  found = {
    platform
    for platform in ("cpu", "tpu", "cuda")
    if "complex<f32>" in traced.lower(lowering_platforms=(platform,)).as_text()
  }
  assert found == {"cpu"}


def test_elements_per_pair_are_those_of_the_sum_in_turn():
  score = scores.additive(jnp.eye(32), jnp.eye(32), jnp.ones(32))
  tokens = jax.ShapeDtypeStruct((128, 32), jnp.float32)
  assert trace_score(score, tokens, tokens)[1] == 1
