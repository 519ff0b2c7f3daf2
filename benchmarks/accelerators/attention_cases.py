"""Attention by score, by mask or bias, and by derivative, on one device."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import attention
from attention import biases, masks, normalizers, scores
from attention.implementations import Pallas
from benchmarks.accelerators.cases import Case
from benchmarks.attention import score_cases
from benchmarks.attention.score_cases import ScoreCase
from experiments.aot.targets import Target

BATCH, HEADS, LENGTH, FEATURES, HIDDEN = 1, 8, 4096, 128, 64
LONG = 16384
# Scores that need D elements per pair.
CLOSURE_HEADS, CLOSURE_FEATURES = 1, 64

SCORES: dict[str, ScoreCase] = score_cases.classical(FEATURES, HIDDEN) | {
  "soft_cap": ScoreCase(lambda: scores.soft_cap(scores.scaled_dot(), 30.0)),
  "qk_norm": ScoreCase(lambda: scores.qk_norm(scores.dot())),
  "shaw": ScoreCase(scores.shaw, ((2 * 32 + 1, FEATURES),)),
  "disentangled": ScoreCase(
    scores.disentangled,
    ((64, FEATURES), (64, FEATURES)),
  ),
  "transformer_xl": ScoreCase(
    scores.transformer_xl,
    ((FEATURES, FEATURES), (FEATURES,), (FEATURES,)),
  ),
  "location": ScoreCase(scores.location, ((LENGTH, FEATURES),)),
  "local": ScoreCase(
    lambda *weights: scores.local(scores.scaled_dot(), 128.0, *weights),
    ((FEATURES, HIDDEN), (HIDDEN,)),
  ),
  "local_m": ScoreCase(lambda: scores.local(scores.scaled_dot(), 128.0)),
  "temperature": ScoreCase(
    lambda temperature: scores.temperature(scores.scaled_dot(), temperature),
    ((HEADS,),),
  ),
  "forgetting": ScoreCase(
    lambda log_gates: scores.forgetting(scores.scaled_dot(), log_gates),
    ((HEADS, LENGTH),),
  ),
  "manhattan": score_cases.MANHATTAN,
}
# Keyword arguments of `attend`, for arrays that are traced.
PATTERNS: dict[str, Callable[..., dict[str, Any]]] = {
  "none": lambda lengths: {},
  "causal": lambda lengths: {"mask": masks.causal()},
  "padding": lambda lengths: {"mask": masks.padding(lengths)},
  "window": lambda lengths: {"mask": masks.sliding_window(256, 0)},
  "alibi": lambda lengths: {"bias": biases.alibi(HEADS)},
}
# Of a scaled dot product in kernels: biases, and the shapes of their arrays.
BIASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
  "t5": (biases.relative_position, (32, HEADS)),
  "pairs": (biases.as_bias, (HEADS, LENGTH, LENGTH)),
  "keys": (biases.as_bias, (HEADS, 1, LENGTH)),
}
# Of a causal scaled dot product, in kernels.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
  "softpick": lambda: {"normalizer": normalizers.softpick()},
  "signed_softmax": lambda: {"normalizer": normalizers.signed_softmax()},
  "sigmoid": lambda: {"normalizer": normalizers.sigmoid()},
  "entmax": lambda: {"normalizer": normalizers.entmax()},
  "sparsemax": lambda: {"normalizer": normalizers.sparsemax()},
  "dropout": lambda: {"dropout_rate": 0.1, "rng": jax.random.key(0)},
}
DERIVATIVES = ("forward", "gradient", "jvp")
_DEFAULT_SCORES = ("scaled_dot", "general", "additive", "manhattan")


def cases() -> Iterator[Case]:
  """One case for each score, pattern and derivative, and those of kernels."""
  yield from _kernel_cases()
  yield from _long_cases()
  for score in SCORES:
    for pattern in PATTERNS:
      if score == "manhattan" and pattern == "alibi":
        continue  # one head
      for derivative in DERIVATIVES:
        is_default = score in _DEFAULT_SCORES and (
          derivative != "jvp" or pattern == "none"
        )
        yield Case(
          f"attention/{score}/{pattern}/{derivative}",
          functools.partial(_make, score, pattern, derivative),
          is_default,
        )


def _kernel_cases() -> Iterator[Case]:
  """The same with the kernels of `implementation="pallas"`, as supported."""
  for score in SCORES:
    for pattern in PATTERNS:
      if score == "manhattan" and pattern == "alibi":
        continue
      for derivative in DERIVATIVES if pattern == "none" else DERIVATIVES[:2]:
        yield Case(
          f"pallas/{score}/{pattern}/{derivative}",
          functools.partial(
            _make, score, pattern, derivative, with_kernels=True
          ),
          pattern in ("none", "causal") and score in _DEFAULT_SCORES,
        )
  for derivative in DERIVATIVES[:2]:
    for name in BIASES:
      yield Case(
        f"pallas/scaled_dot/{name}/{derivative}",
        functools.partial(_make_with_bias, name, derivative),
        True,
      )
    for name in OPTIONS:
      yield Case(
        f"pallas/scaled_dot/{name}/{derivative}",
        functools.partial(_make_with_option, name, derivative),
        True,
      )


def _long_cases() -> Iterator[Case]:
  """Kernels of long sequences."""
  for derivative in ("forward", "training"):
    for score in SCORES:
      make = functools.partial(
        _make, score, "none", derivative, length=LONG, with_kernels=True
      )
      yield Case(f"long/{score}/{derivative}", make, score in _DEFAULT_SCORES)
    for name in OPTIONS:
      make = functools.partial(_make_with_option, name, derivative, length=LONG)
      yield Case(f"long/scaled_dot/{name}/{derivative}", make, False)


def _make(
  score: str,
  pattern: str,
  derivative: str,
  target: Target,
  *,
  length: int = LENGTH,
  with_kernels: bool = False,
):
  if score == "manhattan":
    heads, features = CLOSURE_HEADS, CLOSURE_FEATURES
  else:
    heads, features = HEADS, FEATURES
  case = SCORES[score]
  spec = functools.partial(_spec, on_one_device(target))
  tokens = [spec(BATCH, heads, length, features)] * 3
  parameters = [
    spec(*(length if n == LENGTH else n for n in shape), dtype=jnp.float32)
    for shape in case.shapes
  ]
  lengths = spec(BATCH, dtype=jnp.int32)
  kernels = _kernels(target)

  def attend(query, key, value, *rest):
    *parameters, lengths = rest
    return attention.attend(
      query,
      key,
      value,
      score=case.bind(*parameters),
      implementation=kernels if with_kernels else None,
      **PATTERNS[pattern](lengths),
    )

  count = len(tokens) + len(parameters)
  return derived(attend, derivative, count, *tokens, *parameters, lengths)


def _make_with_bias(name: str, derivative: str, target: Target):
  """Kernels with a bias, of which the array is differentiated too."""
  bind, shape = BIASES[name]
  spec = functools.partial(_spec, on_one_device(target))
  tokens = [spec(BATCH, HEADS, LENGTH, FEATURES)] * 3

  def attend(query, key, value, array):
    return attention.attend(
      query, key, value, bias=bind(array), implementation=_kernels(target)
    )

  array = spec(*shape, dtype=jnp.float32)
  return derived(attend, derivative, 4, *tokens, array)


def _make_with_option(
  name: str, derivative: str, target: Target, *, length: int = LENGTH
):
  """Kernels of a causal scaled dot product with more arguments."""
  spec = functools.partial(_spec, on_one_device(target))

  def attend(*tokens):
    return attention.attend(
      *tokens,
      mask=masks.causal(),
      **OPTIONS[name](),
      implementation=_kernels(target),
    )

  tokens = [spec(BATCH, HEADS, length, FEATURES)] * 3
  return derived(attend, derivative, 3, *tokens)


def _kernels(target: Target) -> Pallas:
  return Pallas(target="tpu" if target.platform == "tpu" else "hopper")


def derived(
  function: Callable[..., Any],
  derivative: str,
  count: int,
  *arguments: jax.ShapeDtypeStruct,
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
  """A program and its arguments.

  Computes the function, or its derivative with respect to the first `count`
  arguments. A gradient has the cotangents of the results as further arguments,
  as another layer gives them in training. "training" returns results and
  gradients.
  """
  if derivative == "forward":
    return function, arguments

  def jvp(*arrays):
    first, rest = arrays[:count], arrays[count:]
    return jax.jvp(lambda *first: function(*first, *rest), first, first)

  def gradient(cotangents, *arrays):
    first, rest = arrays[:count], arrays[count:]
    results, transpose = jax.vjp(lambda *x: function(*x, *rest), *first)
    gradients = transpose(cotangents)
    return gradients if derivative == "gradient" else (results, gradients)

  if derivative == "jvp":
    return jvp, arguments
  results = jax.eval_shape(function, *arguments)
  sharding = arguments[0].sharding
  cotangents = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), results
  )
  return gradient, (cotangents, *arguments)


def on_one_device(target: Target) -> NamedSharding:
  """The sharding of arrays of a single device."""
  return NamedSharding(
    Mesh(np.array(target.devices()), ("device",)), PartitionSpec()
  )


def _spec(sharding, *shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
