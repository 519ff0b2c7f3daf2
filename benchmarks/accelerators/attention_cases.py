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
from experiments.aot.targets import Target

BATCH, HEADS, LENGTH, FEATURES, HIDDEN = 1, 8, 4096, 128, 64
LONG = 16384
# Scores that need D elements per pair.
CLOSURE_HEADS, CLOSURE_FEATURES = 1, 64

# A score, and the shapes of the arrays that it is made of.
SCORES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
  "scaled_dot": (scores.scaled_dot, ()),
  "dot": (scores.dot, ()),
  "general": (scores.general, ((FEATURES, FEATURES),)),
  "cosine": (scores.cosine, ((),)),
  "additive": (
    scores.additive,
    ((FEATURES, HIDDEN), (FEATURES, HIDDEN), (HIDDEN,)),
  ),
  "concat": (scores.concat, ((2 * FEATURES, HIDDEN), (HIDDEN,))),
  "soft_cap": (lambda: scores.soft_cap(scores.scaled_dot(), 30.0), ()),
  "qk_norm": (lambda: scores.qk_norm(scores.dot()), ()),
  "shaw": (scores.shaw, ((2 * 32 + 1, FEATURES),)),
  "disentangled": (
    scores.disentangled,
    ((64, FEATURES), (64, FEATURES)),
  ),
  "transformer_xl": (
    scores.transformer_xl,
    ((FEATURES, FEATURES), (FEATURES,), (FEATURES,)),
  ),
  "location": (scores.location, ((LENGTH, FEATURES),)),
  "local": (
    lambda *weights: scores.local(scores.scaled_dot(), 128.0, *weights),
    ((FEATURES, HIDDEN), (HIDDEN,)),
  ),
  "local_m": (lambda: scores.local(scores.scaled_dot(), 128.0), ()),
  "temperature": (
    lambda temperature: scores.temperature(scores.scaled_dot(), temperature),
    ((HEADS,),),
  ),
  "forgetting": (
    lambda log_gates: scores.forgetting(scores.scaled_dot(), log_gates),
    ((HEADS, LENGTH),),
  ),
}


def manhattan(temperature: jax.Array) -> Callable[..., jax.Array]:
  """A score that a user might write."""

  def score(query, key):
    gap = query[..., :, None, :] - key[..., None, :, :]
    return -jnp.abs(gap).sum(-1) * temperature

  return score


# Keyword arguments of `attend`, for arrays that are traced.
PATTERNS: dict[str, Callable[..., dict[str, Any]]] = {
  "none": lambda lengths: {},
  "causal": lambda lengths: {"mask": masks.causal()},
  "padding": lambda lengths: {"mask": masks.padding(lengths)},
  "window": lambda lengths: {"mask": masks.sliding_window(256, 0)},
  "alibi": lambda lengths: {"bias": biases.alibi(HEADS)},
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
_OF_KERNELS = (
  *("scaled_dot", "dot", "general", "cosine", "additive", "concat"),
  *("soft_cap", "qk_norm", "temperature", "local_m", "manhattan"),
  *(
    "shaw",
    "disentangled",
    "transformer_xl",
    "location",
    "forgetting",
    "local",
  ),
)
_DEFAULT_SCORES = ("scaled_dot", "general", "additive", "manhattan")


def cases() -> Iterator[Case]:
  """One case for each score, pattern and derivative, and those of kernels."""
  yield from _kernel_cases()
  yield from _long_cases()
  for score in (*SCORES, "manhattan"):
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
  for score in _OF_KERNELS:
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
    yield Case(
      f"pallas/scaled_dot/t5/{derivative}",
      functools.partial(_make_t5, derivative),
      True,
    )
    for name in OPTIONS:
      yield Case(
        f"pallas/scaled_dot/{name}/{derivative}",
        functools.partial(_make_with_option, name, derivative),
        True,
      )


def _long_cases() -> Iterator[Case]:
  """Kernels of long sequences; the gradient's cotangent is an argument."""
  for score in _OF_KERNELS:
    for derivative in ("forward", "vjp"):
      make = functools.partial(
        _make, score, "none", derivative, length=LONG, with_kernels=True
      )
      yield Case(f"long/{score}/{derivative}", make, score in _DEFAULT_SCORES)


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
  bind, shapes = (SCORES | {"manhattan": (manhattan, ((),))})[score]
  spec = functools.partial(_spec, on_one_device(target))
  tokens = [spec(BATCH, heads, length, features)] * 3
  parameters = [
    spec(*(length if n == LENGTH else n for n in shape), dtype=jnp.float32)
    for shape in shapes
  ]
  lengths = spec(BATCH, dtype=jnp.int32)
  kernels = _kernels(target)

  def attend(query, key, value, *rest):
    *parameters, lengths = rest
    return attention.attend(
      query,
      key,
      value,
      score=bind(*parameters),
      implementation=kernels if with_kernels else None,
      **PATTERNS[pattern](lengths),
    )

  # The value's shape is that of the context and of its cotangent.
  cotangent = tokens[-1:] if derivative == "vjp" else []
  return (
    derived(attend, derivative, len(tokens) + len(parameters)),
    (*tokens, *parameters, lengths, *cotangent),
  )


def _make_t5(derivative: str, target: Target):
  """Kernels with T5's bias, of which the table is differentiated too."""
  spec = functools.partial(_spec, on_one_device(target))
  tokens = [spec(BATCH, HEADS, LENGTH, FEATURES)] * 3

  def attend(query, key, value, table):
    bias = biases.relative_position(table)
    return attention.attend(
      query, key, value, bias=bias, implementation=_kernels(target)
    )

  return derived(attend, derivative, 4), (
    *tokens,
    spec(32, HEADS, dtype=jnp.float32),
  )


def _make_with_option(name: str, derivative: str, target: Target):
  """Kernels of a causal scaled dot product with more arguments."""
  spec = functools.partial(_spec, on_one_device(target))

  def attend(*tokens):
    return attention.attend(
      *tokens,
      mask=masks.causal(),
      **OPTIONS[name](),
      implementation=_kernels(target),
    )

  tokens = [spec(BATCH, HEADS, LENGTH, FEATURES)] * 3
  return derived(attend, derivative, 3), tokens


def _kernels(target: Target) -> Pallas:
  return Pallas(target="tpu" if target.platform == "tpu" else "hopper")


def derived(
  function: Callable[..., jax.Array], derivative: str, count: int
) -> Callable[..., Any]:
  """The function, or a derivative with respect to its first arguments."""

  def total(*arguments):
    return function(*arguments).astype(jnp.float32).sum()

  def jvp(*arguments):
    first, rest = arguments[:count], arguments[count:]
    return jax.jvp(lambda *first: function(*first, *rest), first, first)

  def vjp(*arguments):
    first, (*rest, cotangent) = arguments[:count], arguments[count:]
    return jax.vjp(lambda *first: function(*first, *rest), *first)[1](cotangent)

  by_name = {
    "forward": function,
    "vjp": vjp,
    "gradient": jax.grad(total, tuple(range(count))),
    "jvp": jvp,
  }
  return by_name[derivative]


def on_one_device(target: Target) -> NamedSharding:
  """The sharding of arrays of a single device."""
  return NamedSharding(
    Mesh(np.array(target.devices()), ("device",)), PartitionSpec()
  )


def _spec(sharding, *shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
