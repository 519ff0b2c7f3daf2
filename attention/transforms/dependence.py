"""Along which axes a traced function combines the entries of arrays."""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

# The parameters that name the axes along which an operation is not the same
# for every entry.
_AXES = ("axes", "axis", "dimension", "dimensions")
_ALONG_AXES = ("reduce", "arg", "cum", "sort", "rev", "split", "iota")
# Operations on matrices, the last two axes, and on whole arrays.
_OF_MATRICES = (
  *("cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product"),
  *("lu", "lu_pivots_to_permutation", "qr", "schur", "svd", "triangular_solve"),
  *("tridiagonal", "tridiagonal_solve"),
)
_UNKNOWN = (
  *("ffi_call", "io_callback", "pallas_call", "pure_callback"),
  "call_hi_primitive",  # JAX 0.12, for instance jnp.nonzero
)
# Operations on constants that are evaluated. JAX computes the start of a slice
# by them, which is 0 for a whole axis.
_FOLDED = {
  "lt": operator.lt,
  "add": operator.add,
  "select_n": lambda which, *cases: cases[int(which)],
}


def equations(jaxpr) -> Iterator:
  """The equations of a jaxpr and of those inside of it."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in _inner(equation):
      yield from equations(inner)


def _inner(equation) -> list:
  """The jaxprs inside of an equation."""
  inner = list(jaxprs_in_params(equation.params))
  # Of the branches of `jax.lax.platform_dependent`, the one for CPUs: the
  # others may be sums that accelerators fuse.
  return inner[:1] if equation.params.get("branches_platforms") else inner


def longest_axis(closed: ClosedJaxpr) -> int:
  """The size of the longest axis of all arrays of a jaxpr."""
  variables = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
  for equation in equations(closed.jaxpr):
    variables += [*equation.invars, *equation.outvars]
  shapes = (getattr(each.aval, "shape", ()) for each in variables)
  return max((size for shape in shapes for size in shape), default=0)


def multiple_above(length: int, limit: int) -> int:
  """The first multiple of a length above a limit."""
  return length * (limit // max(length, 1) + 1)


def traced_longer(
  trace: Callable[..., ClosedJaxpr], sizes: Mapping[str, int], rule: str
) -> ClosedJaxpr:
  """trace(*sizes); raises ValueError with the rule if the function fails.

  Args:
    trace: traces a function of the user for given sizes of its arguments.
    sizes: the sizes by what they count, for instance {"queries": 14}.
    rule: the text of the error, with {} for what the function does.
  """
  try:
    return trace(*sizes.values())
  except Exception as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    shown = " and ".join(f"{size} {name}" for name, size in sizes.items())
    raise ValueError(rule.format(f"fails for {shown}: {reason}")) from error


def combined_entries(closed: ClosedJaxpr, longest: int) -> str:
  """How entries of axes longer than this are combined or numbered, or ""."""
  for equation in equations(closed.jaxpr):
    if any(size > longest for size in _combined(equation)):
      return f"computes `{equation.primitive.name}` over"
  for constant in closed.consts:
    if (
      isinstance(constant, np.ndarray)
      and max(constant.shape, default=0) > longest
      and (constant != constant.flat[0]).any()
    ):
      return "has an array with an entry for each of"
  return ""


def combines_entries(
  closed: ClosedJaxpr, trace_longer: Callable[[], ClosedJaxpr], longest: int
) -> bool:
  """Whether a function combines or counts the entries of some axes.

  Args:
    closed: the traced function.
    trace_longer: traces it for arguments whose axes in question are longer.
    longest: the size that only these axes exceed.
  """
  try:
    longer = trace_longer()
  except Exception:  # The function has an array with an entry for each.
    return True
  is_same = numbers(closed) == numbers(longer)
  return not is_same or bool(combined_entries(longer, longest))


def num_carry(scan) -> int:
  """The number of results that a `lax.scan` passes to its next iteration."""
  # Its parameters for this differ between versions of JAX.
  (inner,) = jaxprs_in_params(scan.params)
  pairs: Any = zip(scan.outvars, inner.outvars)
  return sum(whole.aval.shape == one.aval.shape for whole, one in pairs)


def _mixed(shape: Sequence[int], new_shape: Sequence[int]) -> Iterator[int]:
  """The sizes of axes that a reshape divides and joins with other axes."""
  for start, stop in _strides(shape):
    parts = [
      part for part in _strides(new_shape) if part[0] < stop and part[1] > start
    ]
    are_inside = all(start <= part[0] and part[1] <= stop for part in parts)
    if len(parts) > 1 and not are_inside:
      yield stop // start


def _strides(shape: Sequence[int]) -> list[tuple[int, int]]:
  """The strides of each axis and of the axis before it."""
  strides = [*itertools.accumulate(reversed(shape), operator.mul, initial=1)]
  return [*itertools.pairwise(strides)]


def numbers(closed: ClosedJaxpr) -> set[str]:
  """The single numbers that a jaxpr computes with."""
  constants = {
    str(constant.flat[0])
    for constant in closed.consts
    if isinstance(constant, np.ndarray) and constant.size == 1
  }
  return constants.union(_numbers(closed.jaxpr))


def _numbers(jaxpr) -> Iterator[str]:
  known: dict[Any, Any] = {}
  for equation in jaxpr.eqns:
    values = [
      each.val if isinstance(each, Literal) else known.get(each)
      for each in equation.invars
    ]
    fold: Any = _FOLDED.get(equation.primitive.name)
    if fold and all(value is not None for value in values):
      known[equation.outvars[0]] = fold(*values)
      continue
    yield from (str(value) for value in values if value is not None)
    for inner in _inner(equation):
      yield from _numbers(inner)


def _combined(equation) -> Sequence[int]:
  """The sizes of axes whose entries an operation treats differently."""
  name, params = equation.primitive.name, equation.params
  if not equation.outvars:
    return []
  result = equation.outvars[0].aval.shape
  shape = equation.invars[0].aval.shape if equation.invars else result
  if name == "reshape":
    return [*_mixed(shape, result)]
  if name == "dot_general":
    return [shape[axis] for axis in params["dimension_numbers"][0][0]]
  if name == "concatenate":
    return [result[params["dimension"]]]
  if name == "scan":
    return [params["length"]] if num_carry(equation) else []
  if name == "gather":
    axes = params["dimension_numbers"].start_index_map
    sizes = params["slice_sizes"]
    return [shape[axis] for axis in axes if sizes[axis] != shape[axis]]
  if name.startswith("scatter"):
    axes = params["dimension_numbers"].scatter_dims_to_operand_dims
    return [shape[axis] for axis in axes]
  if name in ("pad", "slice", "dynamic_slice", "dynamic_update_slice"):
    if name == "dynamic_update_slice":
      result = equation.invars[1].aval.shape
    return [max(each) for each in zip(shape, result) if len({*each}) > 1]
  if name == "conv_general_dilated":
    return [shape[axis] for axis in params["dimension_numbers"].lhs_spec[2:]]
  if name.startswith("reduce_window"):
    return [n for n, m in zip(shape, params["window_dimensions"]) if m > 1]
  if name in ("random_bits", "rng_bit_generator"):
    return equation.outvars[-1].aval.shape
  if name in _OF_MATRICES:
    return [size for each in equation.invars for size in each.aval.shape[-2:]]
  if name in _UNKNOWN:
    return [size for each in equation.invars for size in each.aval.shape]
  if name == "approx_top_k":
    return [shape[params["reduction_dimension"]]]
  if name in ("top_k", "fft"):
    return shape[-1:]
  if name.startswith(_ALONG_AXES):
    axes = next((params[each] for each in _AXES if each in params), ())
    return [shape[n] for n in ([axes] if isinstance(axes, int) else axes)]
  return []
