"""cuDNN's kernel for arrays [B, N, T, D], with derivatives of every mode.

The kernel itself has reverse mode only. Forward mode and derivatives of higher
order are those of the blockwise rule, which needs the kernel's two results.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from attention.arrays.matmul import matmul_precision
from attention.arrays.softmax import from_lse
from attention.implementations.blockwise import Blockwise
from attention.implementations.cudnn.tokens import all_batched
from attention.masks.types import Band, Below, Mask, as_mask
from attention.request import make_request
from attention.scores.classical import ScaledDot
from attention.transforms.custom_transpose import with_kernel_as_transpose
from attention.transforms.tangent_rule import instantiated, with_tangent_rule


class Arrays(NamedTuple):
  """The arrays of a call; N is 1 or the number of heads of queries."""

  query: Any  # [B, N, T, D]
  key: Any
  value: Any
  bias: Any = None  # [B or 1, N or 1, T, S], finite
  visible: Any = None  # bool, of the same shape
  lengths: Any = None  # [B], numbers of keys

  @property
  def linear(self) -> list[Any]:
    """The arrays, or tangents, of which the result is differentiable."""
    tokens = [self.query, self.key, self.value]
    return tokens if self.bias is None else [*tokens, self.bias]

  def with_linear(self, arrays: list[Any]) -> "Arrays":
    """The arguments with these in place of `linear`."""
    return Arrays(*arrays, *self[len(arrays) :])


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A call of the kernel: what is known while tracing."""

  is_causal: bool = False  # whether query i attends to no key after i
  window: int | None = None  # keys before a query that it attends to
  scale: float = 1.0  # the factor of the scores
  precision: str | None = None  # of the rule's products, see `Request`
  branch: str | None = None  # see `Request`

  def context(self, arrays: Arrays) -> jax.Array:
    """The context [B, N, T, E]."""
    return self._results(arrays, 1)[0]

  def context_and_lse(self, arrays: Arrays) -> list[jax.Array]:
    """The context, and the log-sum-exp [B, N, T] without derivatives."""
    return self._results(arrays, 2)

  def _results(self, arrays: Arrays, count: int | None) -> list[jax.Array]:
    """The first results; None adds what the kernel saves for reverse mode."""

    def primal(arrays):
      if count == 1:
        return [self._call(arrays, return_residual=False)]
      if count == 2:
        return [*self._call(arrays, return_residual=True)]
      values = jax.tree.leaves(self._with_pull_back(arrays))
      return [values[n] for n in self._saved(arrays).outputs]

    def rule(primals, tangents):
      (arrays,), (of_arrays,) = primals, tangents
      saved = self._results(arrays, None)
      outputs = saved[:count]
      zeros = [zero_from_primal(x, symbolic_zeros=True) for x in outputs[1:]]
      return outputs, [self._tangent(arrays, saved, of_arrays.linear), *zeros]

    return with_tangent_rule(primal, rule, arrays)

  def _tangent(self, arrays, saved, tangents):
    """The tangent of the context."""
    chosen = [
      place
      for place, tangent in enumerate(tangents)
      if not isinstance(tangent, SymbolicZero)
    ]
    if not chosen:
      return jnp.zeros_like(saved[0])
    residuals, structure = jax.tree.flatten((arrays, saved))
    (tangent,) = with_kernel_as_transpose(
      functools.partial(self._rule, structure, chosen),
      functools.partial(self._reverse, structure, chosen),
      residuals,
      [tangents[place] for place in chosen],
    )
    return tangent

  def _rule(self, structure, chosen, residuals, tangents):
    """The tangent of the context, by the blockwise rule."""
    arrays, (context, lse, *_) = jax.tree.unflatten(structure, residuals)
    # The kernel's result of a row without a key is not specified.
    lse = jnp.where(jnp.isfinite(lse), lse, jnp.zeros_like(lse))
    results = self._with_derivatives(arrays, (context.astype(lse.dtype), lse))

    def outputs(*chosen_arrays):
      linear = arrays.linear
      for place, array in zip(chosen, chosen_arrays):
        linear[place] = array
      of_context, _ = self._blockwise(arrays.with_linear(linear), results)
      return [of_context.astype(context.dtype)]

    primals = [arrays.linear[place] for place in chosen]
    return jax.jvp(outputs, primals, [*tangents])[1]

  def _with_derivatives(self, arrays: Arrays, results):
    """The context and the lse, with derivatives by the blockwise rule."""
    # Those of the kernel's results lack the derivatives of the lse.

    def rule(primals, tangents):
      arrays, results = primals
      results = self._with_derivatives(arrays, results)

      def outputs(*linear):
        return self._blockwise(arrays.with_linear([*linear]), results)

      known = [*map(instantiated, tangents[0].linear)]
      return results, jax.jvp(outputs, arrays.linear, known)[1]

    return with_tangent_rule(lambda _, results: results, rule, arrays, results)

  def _blockwise(self, arrays: Arrays, results):
    """The results, the context and the lse, with those tangents."""
    query, key, value, *bias = arrays.linear
    context, lse = results
    with matmul_precision(self.precision):
      request = make_request(
        query,
        key,
        value,
        score=ScaledDot(self.scale),
        mask=self._mask(arrays),
        bias=bias[0] if bias else None,
        combined=(context, from_lse(lse)),
      )
      request = dataclasses.replace(request, branch=self.branch)
      context, statistics = Blockwise()(request)
    return context, statistics.lse

  def _mask(self, arrays: Arrays) -> Mask | None:
    """The keys that queries attend to."""
    masks: list[Mask] = []
    if arrays.visible is not None:
      masks.append(as_mask(arrays.visible))
    if self.is_causal:
      masks.append(Band(self.window, 0))
    if arrays.lengths is not None:
      masks.append(Below(arrays.lengths))
    return functools.reduce(operator.and_, masks) if masks else None

  def _reverse(self, structure, chosen, residuals, cotangents):
    """The gradients, by the kernel."""
    arrays, saved = jax.tree.unflatten(structure, residuals)
    gradients = self._saved(arrays).pull_back(arrays, saved, *cotangents)
    return [gradients[place] for place in chosen]

  def _with_pull_back(self, arrays: Arrays):
    """The context, the lse, and the function from cotangents to gradients."""

    def results(*linear):
      return self._call(arrays.with_linear([*linear]), return_residual=True)

    (context, lse), pull_back = jax.vjp(results, *arrays.linear)
    return context, lse, pull_back

  def _saved(self, arrays: Arrays) -> "_Saved":
    closed, shapes = jax.make_jaxpr(self._with_pull_back, return_shape=True)(
      jax.tree.map(jax.typeof, arrays)
    )
    structure = jax.tree.structure(shapes)
    return _Saved(closed.jaxpr.invars, closed.jaxpr.outvars, structure)

  def _call(self, arrays: Arrays, *, return_residual: bool):
    return call(
      *arrays[:3],
      bias=arrays.bias,
      mask=arrays.visible,
      lengths=arrays.lengths,
      is_causal=self.is_causal,
      sliding_window_length=None if self.window is None else self.window + 1,
      scale=self.scale,
      return_residual=return_residual,
    )


@dataclasses.dataclass(frozen=True)
class _Saved:
  """What reverse mode needs, without arguments and results a second time."""

  arguments: list[Any]  # variables of the program
  results: list[Any]  # the context, the lse, and what the kernel saves
  structure: Any

  @property
  def outputs(self) -> list[int]:
    """The places of results that are neither arguments nor earlier results."""
    known, places = [*map(id, self.arguments)], []
    for place, variable in enumerate(self.results):
      if id(variable) not in known:
        places.append(place)
        known.append(id(variable))
    return places

  def pull_back(self, arrays: Arrays, saved, cotangent) -> list[jax.Array]:
    """The gradients, for the cotangent of the context."""
    results = [self.results[place] for place in self.outputs]
    variables = [*map(id, (*self.arguments, *results))]
    known = dict(zip(variables, [*jax.tree.leaves(arrays), *saved]))
    values = [known[id(variable)] for variable in self.results]
    _, lse, pull_back = jax.tree.unflatten(self.structure, values)
    # JAX's kernel requires all arrays to be batched over each `jax.vmap` axis.
    cotangent, _ = all_batched(cotangent, saved[0])
    return pull_back((cotangent, jnp.zeros_like(lse)))


def call(query, key, value, **options):
  """JAX's interface to cuDNN: the context, and the lse if asked for."""
  # `jax.nn` has no option for this layout, in which heads precede tokens: it
  # would cost a copy of each array. It also rounds the log-sum-exp.
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  causal, lengths = options.pop("is_causal"), options.pop("lengths")
  if lengths is not None:
    options["q_seqlen"] = jnp.full_like(lengths, query.shape[-2])
    options["kv_seqlen"] = lengths
    mask_type = cudnn.MaskType.PADDING
    if causal:
      mask_type = cudnn.MaskType.PADDING_CAUSAL
  else:
    mask_type = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
  return cudnn.dot_product_attention(
    query, key, value, mask_type=mask_type, qkv_layout="BNTH", **options
  )
