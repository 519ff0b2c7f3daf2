"""The operations of the matrix products in a program for a GPU.

They are weighted by dtype: an operation in float32 counts as two of bfloat16,
since XLA rounds factors to TF32 by default, whose rate is half as high. Kernels
of Pallas count as none, because their code is not in the program's text.
"""

import math

from experiments.aot import hlo
from experiments.aot.hlo import Sizes

_WEIGHTS = {"f64": 16.0, "f32": 2.0, "s8": 0.5, "f8e4m3fn": 0.5, "f8e5m2": 0.5}


def operations(
  program: hlo.Program, sizes: Sizes, instruction: hlo.Instruction
) -> float:
  """The operations of an instruction's products, in those of bfloat16."""
  match instruction.opcode:
    case "dot":
      contracted = instruction.numbers("lhs_contracting_dims")
      return _of_product(sizes, instruction, contracted)
    case "convolution":
      return _of_convolution(sizes, instruction)
    case "fusion":
      (name,) = instruction.called("calls")
      inner = program.computations.get(name, ())
      return sum(operations(program, sizes, each) for each in inner)
    case "custom-call":
      return _of_library(sizes, instruction)
  return 0.0


def _of_library(sizes: Sizes, instruction: hlo.Instruction) -> float:
  """The operations of a call of cuBLAS or cuDNN; 0 of other libraries."""
  if "__cublas$" in instruction.text:
    contracted = instruction.numbers("lhs_contracting_dimensions")
    return _of_product(sizes, instruction, contracted)
  if "__cudnn$conv" in instruction.text:
    return _of_convolution(sizes, instruction)
  if "__cudnn$fmha" in instruction.text:
    return _of_attention(sizes, instruction)
  return 0.0


def _of_product(
  sizes: Sizes, instruction: hlo.Instruction, contracted: list[int]
) -> float:
  left = sizes[instruction.operands[0]][0]
  length = math.prod(left.shape[axis] for axis in contracted)
  count = 2.0 * math.prod(instruction.arrays[0].shape) * length
  return count * _weight(left, instruction)


def _of_convolution(sizes: Sizes, instruction: hlo.Instruction) -> float:
  """Each output reads the window and the channels of one output feature."""
  kernel = sizes[instruction.operands[1]][0]
  labels = instruction.text.partition("dim_labels=")[2]
  features = kernel.shape[labels.partition("_")[2].index("o")]
  window = math.prod(kernel.shape) / features
  count = 2.0 * math.prod(instruction.arrays[0].shape) * window
  return count * _weight(kernel, instruction)


def _of_attention(sizes: Sizes, instruction: hlo.Instruction) -> float:
  """Causal kernels skip half of the pairs; all pairs of others count."""
  query, key, value = (sizes[name][0] for name in instruction.operands[:3])
  *leading, length, features = query.shape
  pairs = 1.0 * math.prod(leading) * length * key.shape[-2]
  if "CAUSAL" in instruction.text:
    pairs /= 2
  if "Backward" in instruction.text:
    # The scores again and the gradients of query and key; the cotangents of
    # the weights and of values.
    count = 3 * features + 2 * value.shape[-1]
  else:
    count = features + value.shape[-1]
  return 2.0 * pairs * count * _weight(query, instruction)


def _weight(factor: hlo.Array, instruction: hlo.Instruction) -> float:
  if "algorithm=dot_bf16_bf16_f32," in instruction.text:
    return 1.0
  return _WEIGHTS.get(factor.dtype, 1.0)
