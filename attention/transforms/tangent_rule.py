"""Functions with a rule for tangents, also for second derivatives of loops.

Reverse mode of `jax.lax.scan` replaces a `jax.custom_jvp` by its function. The
next order then needs the derivative of that function, which a kernel does not
have. Inside of the `jax.custom_jvp`, the function is therefore a primitive with
the same rule, which JAX keeps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval


def with_tangent_rule(
  function: Callable[..., Any],
  rule: Callable[[tuple, tuple], tuple[Any, Any]],
  *arguments: Any,
) -> Any:
  """`function(*arguments)`, whose derivatives in all modes are those of `rule`.

  Args:
    function: of pytrees of arrays; it must not capture other arrays of a trace.
    rule: (primals, tangents) -> (results, their tangents), linear in the
      tangents and differentiable. Tangents that are zero are `SymbolicZero`.
    *arguments: the arguments of `function`.

  Returns:
    The results of `function`, a pytree of arrays.

  Example:
    >>> import jax.numpy as jnp
    >>> def rounded(x):
    ...   def rule(primals, tangents):
    ...     return rounded(*primals), instantiated(*tangents)
    ...   return with_tangent_rule(jnp.round, rule, x)
    >>> jax.grad(rounded)(jnp.float32(1.4))
    Array(1., dtype=float32)
  """

  # The primitive alone would trace `function` also where only the rule is used.
  @jax.custom_jvp
  def call(*arguments):
    return _bound(function, rule, arguments)

  call.defjvp(rule, symbolic_zeros=True)
  return call(*arguments)


class KeptJvp:
  """`jax.custom_jvp` whose rule loops keep, as that of `with_tangent_rule`.

  Example:
    >>> import jax.numpy as jnp
    >>> @functools.partial(KeptJvp, nondiff_argnums=(0,))
    ... def rounded(scale, x):
    ...   return jnp.round(scale * x)
    >>> @rounded.defjvp
    ... def rule(scale, primals, tangents):
    ...   return rounded(scale, *primals), scale * tangents[0]
    >>> jax.grad(rounded, 1)(2.0, 1.4)
    Array(2., dtype=float32, weak_type=True)
  """

  def __init__(self, function: Callable, nondiff_argnums: Sequence[int] = ()):
    functools.update_wrapper(self, function)
    self._function = function
    self._count = len(nondiff_argnums)
    assert [*nondiff_argnums] == [*range(self._count)]

  def defjvp(self, rule: Callable, symbolic_zeros: bool = False) -> Callable:
    """Sets the rule, with the arguments of that of `jax.custom_jvp`."""
    self._rule, self._symbolic_zeros = rule, symbolic_zeros
    return rule

  def __call__(self, *arguments: Any) -> Any:
    """The result of the function."""
    if not any(
      isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)
    ):
      # Outside of transformations the primitive would compile at every call.
      return self._function(*arguments)
    static, arrays = arguments[: self._count], arguments[self._count :]

    def rule(primals, tangents):
      if not self._symbolic_zeros:
        tangents = jax.tree.map(instantiated, tangents)
      return self._rule(*static, primals, tangents)

    return with_tangent_rule(
      functools.partial(self._function, *static), rule, *arrays
    )


def instantiated(tangent: Any) -> Any:
  """A tangent as an array, also if it is a `SymbolicZero`."""
  if isinstance(tangent, SymbolicZero):
    return ad.instantiate_zeros(ad.Zero(tangent.aval))
  return tangent


def _bound(function, rule, arguments):
  leaves, structure = jax.tree.flatten(arguments)

  def of_leaves(*leaves):
    return function(*jax.tree.unflatten(structure, leaves))

  def rule_of_leaves(primals, tangents):
    results = rule(
      *(jax.tree.unflatten(structure, each) for each in (primals, tangents))
    )
    return [*map(jax.tree.leaves, results)]

  # JAX looks for operations that need to know the devices in the jaxprs that
  # are parameters.
  jaxpr, types = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
  jaxpr = _without_unused(jaxpr)
  results = _call.bind(*leaves, jaxpr=jaxpr, rule=rule_of_leaves)
  return jax.tree.unflatten(jax.tree.structure(types), results)


def _without_unused(closed: ClosedJaxpr) -> ClosedJaxpr:
  """The program without operations whose results nobody reads."""
  # JAX removes them from a program that it lowers, but not from a parameter.
  # Some, which only traced kernels have, cannot be lowered.
  jaxpr, _ = partial_eval.dce_jaxpr(
    closed.jaxpr, [True] * len(closed.out_avals), instantiate=True
  )
  return ClosedJaxpr(jaxpr, closed.consts)


_call = Primitive("with_tangent_rule")
_call.multiple_results = True


@_call.def_impl
def _results(*arrays, jaxpr, rule):
  del rule
  return jaxpr_as_fun(jaxpr)(*arrays)


@_call.def_effectful_abstract_eval
def _types(*types, jaxpr, rule):
  del rule
  if [*types] != jaxpr.in_avals:  # inside of a `jax.shard_map`, for instance
    jaxpr = jax.make_jaxpr(jaxpr_as_fun(jaxpr))(*types)
  return jaxpr.out_avals, jaxpr.effects


def _jvp(primals, tangents, *, jaxpr, rule):
  del jaxpr
  tangents = [
    SymbolicZero(each.aval) if isinstance(each, ad.Zero) else each
    for each in tangents
  ]
  results, of_results = rule([*primals], tangents)
  return results, [
    ad.Zero(each.aval) if isinstance(each, SymbolicZero) else each
    for each in of_results
  ]


def _batched(axis, arrays, axes, *, jaxpr, rule):
  if all(each is None for each in axes):
    results = _call.bind(*arrays, jaxpr=jaxpr, rule=rule)
    return results, [None] * len(results)
  # With the name of the axis, over which collectives may communicate.
  vmap = functools.partial(jax.vmap, axis_name=axis.name)

  def batched_rule(primals, tangents):
    known = {
      place: each
      for place, each in enumerate(tangents)
      if not isinstance(each, SymbolicZero)
    }

    def of_one(primals, known):
      tangents = [
        known.get(place, zero_from_primal(each, symbolic_zeros=True))
        for place, each in enumerate(primals)
      ]
      results, tangents = rule(primals, tangents)
      return results, [*map(instantiated, tangents)]

    axes_of_known = {place: axes[place] for place in known}
    return vmap(of_one, ([*axes], axes_of_known))(primals, known)

  batched = jax.make_jaxpr(vmap(jaxpr_as_fun(jaxpr), axes))(*arrays)
  results = _call.bind(*arrays, jaxpr=batched, rule=batched_rule)
  return results, [0] * len(results)


ad.primitive_jvps[_call] = _jvp
batching.fancy_primitive_batchers[_call] = _batched
mlir.register_lowering(_call, mlir.lower_fun(_results, multiple_results=True))
