"""The operations of matrix products, and the estimate that they dominate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.aot import cost, hlo, products, targets
from experiments.errors import UserError
from tests.experiments.aot.test_cost import Compiled

# A product of [64, 128] and [128, 32] in a fusion of a loop that runs 7 times.
PROGRAM = """HloModule jit_f, is_scheduled=true

%gemm (p.0: DTYPE[64,128], p.1: DTYPE[128,32]) -> DTYPE[64,32] {
  %p.0 = DTYPE[64,128]{1,0} parameter(0)
  %p.1 = DTYPE[128,32]{1,0} parameter(1)
  ROOT %dot = DTYPE[64,32]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}ALGORITHM, metadata={}
}

%condition (c: (s32[], DTYPE[64,128], DTYPE[128,32])) -> pred[] {
  %c = (s32[], DTYPE[64,128]{1,0}, DTYPE[128,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], DTYPE[64,128], DTYPE[128,32])) -> (s32[], DTYPE[64,128]) {
  %b = (s32[], DTYPE[64,128]{1,0}, DTYPE[128,32]{1,0}) parameter(0)
  %x = DTYPE[64,128]{1,0} get-tuple-element(%b), index=1
  %y = DTYPE[128,32]{1,0} get-tuple-element(%b), index=2
  %new = DTYPE[64,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
  ROOT %t = (s32[], DTYPE[64,128]{1,0}) tuple(%b)
}

ENTRY %main (a: (s32[], DTYPE[64,128])) -> (s32[], DTYPE[64,128]) {
  %a = (s32[], DTYPE[64,128]{1,0}) parameter(0)
  ROOT %loop = (s32[], DTYPE[64,128]{1,0}) while(%a), condition=%condition, \
body=%body
}
"""
PRODUCT = 2 * 64 * 128 * 32


@pytest.mark.parametrize(
  ("dtype", "algorithm", "weight"),
  [
    ("bf16", "", 1),
    ("f32", "", 2),  # TF32
    ("f32", ", algorithm=dot_bf16_bf16_f32", 1),
  ],
)
def test_products_count_as_often_as_their_loop_runs(dtype, algorithm, weight):
  text = PROGRAM.replace("DTYPE", dtype).replace("ALGORITHM", algorithm)
  found = cost.cost_of(Compiled(text), 1.0, target=targets.TARGETS["h100"])
  assert found.operations == 7 * PRODUCT * weight
  # Compilers for TPUs state the cycles of products.
  found = cost.cost_of(Compiled(text), 1.0, target=targets.TARGETS["v5e"])
  assert found.operations == 0


def operations(line):
  """Those of the last line, whose operands the first lines define."""
  program = hlo.parse("\n".join(["ENTRY %main () -> f32[] {", *line, "}"]))
  instructions = program.computations[program.entry]
  sizes = {each.name: each.arrays for each in instructions}
  return products.operations(program, sizes, instructions[-1])


def test_calls_of_libraries_count():
  left = "  %x = bf16[2,8,64,128]{3,2,1,0} parameter(0)"
  kernel = "  %k = bf16[16,3,3,8]{3,2,1,0} parameter(1)"
  assert (
    operations(
      [
        left,
        "  %y = (bf16[2,8,64,32]{3,2,1,0}, s8[9]{0}) custom-call(%x, %x),"
        ' custom_call_target="__cublas$gemm", backend_config={'
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["3"]}}',
      ]
    )
    == 2 * 2 * 8 * 64 * 32 * 128
  )
  assert (
    operations(
      [
        left,
        kernel,
        "  %y = (bf16[2,6,6,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k),"
        " window={size=3x3}, dim_labels=b01f_o01i->b01f,"
        ' custom_call_target="__cudnn$convForward"',
      ]
    )
    == 2 * 2 * 6 * 6 * 16 * 3 * 3 * 8
  )
  for name, mask, count in (
    ("fmhaSoftmax", "PADDING", 2),
    ("fmhaSoftmax", "CAUSAL", 1),
    ("fmhaScaleBiasSoftmaxBackward", "NO_MASK", 5),
  ):
    line = (
      "  %y = (bf16[2,8,64,128]{3,2,1,0}) custom-call(%x, %x, %x),"
      f' custom_call_target="__cudnn${name}", backend_config={{"mask_type":'
      f' "{mask}"}}'
    )
    assert operations([left, line]) == count * 2 * 2 * 8 * 64 * 64 * 128


def test_arithmetic_dominates_the_estimate_of_a_large_product():
  target = targets.TARGETS["h100"]
  try:
    (device,) = target.devices()
  except UserError as error:
    pytest.skip(str(error))
  mesh = jax.sharding.Mesh(np.array([device]), ("x",))
  spec = jax.ShapeDtypeStruct(
    (8192, 8192), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P())
  )
  program, seconds = cost.compiled(jnp.matmul, spec, spec, target=target)
  found = cost.cost_of(program, seconds, target=target)
  assert found.operations == 2 * 8192**3
  assert found.seconds == pytest.approx(2 * 8192**3 / 989e12, rel=0.01)
  assert found.seconds > 5 * found.traffic / target.bandwidth
