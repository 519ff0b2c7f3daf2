"""`jax.jacfwd` of compiled attention, whose batches of tangents are large.

XLA's compiler for CPUs (jaxlib 0.10.2) has wrong results for some sums of
products under `jax.vmap`: https://github.com/jax-ml/jax/issues/39103.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend, masks, normalizers, scores
from tests.attention.oracle import draw
from tests.matrix import sampled

CASES = {
  "softmax": {},
  "causal": {"mask": masks.causal()},
  "cosine": {"score": scores.cosine(jnp.float32(3.0))},
  "soft cap": {"score": scores.soft_cap(scores.dot(), 5.0)},
  "query-key norm": {"score": scores.qk_norm(scores.dot())},
  "entmax": {"normalizer": normalizers.entmax()},
  "sparsemax": {"normalizer": normalizers.sparsemax()},
  "softpick": {"normalizer": normalizers.softpick()},
  "signed softmax": {"normalizer": normalizers.signed_softmax()},
  "stick-breaking": {"normalizer": normalizers.stick_breaking()},
}


@sampled("implementation", ["reference", "blockwise"], default=["reference"])
@sampled("name", CASES, default=["causal", "cosine", "sparsemax"])
def test_forward_mode_equals_reverse_mode(name, implementation):
  *arrays, direction = draw(1, (60, 8), (60, 8), (60, 8), (60, 8))
  tokens = [jnp.asarray(each, jnp.float32) for each in arrays]

  def loss(*tokens):
    context = attend(*tokens, implementation=implementation, **CASES[name])
    return jnp.vdot(context, jnp.asarray(direction, jnp.float32))

  forward = jax.jit(jax.jacfwd(loss, (0, 1, 2)))(*tokens)
  reverse = jax.jit(jax.grad(loss, (0, 1, 2)))(*tokens)
  for got, want in zip(forward, reverse):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
