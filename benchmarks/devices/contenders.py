"""`attend` and its peers on a device, in bfloat16."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend, masks, scores
from benchmarks.attention import peers
from benchmarks.attention.measure import Contender, compiled
from benchmarks.attention.peers import torch

# Calls that wait in the device's queue at once, so that it does not wait for
# the host.
CALLS = 10
# What reads tokens as [B, T, H, D]; the others read [B, H, T, D].
_HEADS_LAST = ("cudnn", "jax.nn")
# Bytes of the scores in float32, for which a formula with all pairs is timed.
_MOST = 8 << 30


def has_torch() -> bool:
  """Whether PyTorch is installed and computes on JAX's device."""
  if torch is None:
    return False
  return jax.default_backend() == "cpu" or (
    jax.default_backend() == "gpu" and torch.cuda.is_available()
  )


def draw(*shapes: tuple[int, ...], dtype=jnp.bfloat16) -> list[jax.Array]:
  """Normal numbers, the same at every call."""
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [
    jax.random.normal(key, shape, jnp.float32).astype(dtype)
    for key, shape in zip(keys, shapes)
  ]


def dot(shape: Sequence[int], *, causal: bool) -> dict[str, Callable]:
  """Scaled dot products of tokens [B, H, T, D], by name.

  The functions of PyTorch have a name that starts with "torch".
  """
  mask = masks.causal() if causal else None
  found: dict[str, Callable] = {}
  if jax.default_backend() == "gpu":
    found["cudnn"] = functools.partial(_jax_nn, "cudnn", causal)
  for name, implementation in (("dispatched", None), ("pallas", "pallas")):
    if name == "pallas" and jax.default_backend() == "cpu":
      continue
    found[name] = functools.partial(
      attend, mask=mask, implementation=implementation
    )
  batch, heads, length, _ = shape
  if 4 * batch * heads * length**2 <= _MOST:
    found["jax.nn"] = functools.partial(_jax_nn, "xla", causal)
  if has_torch():
    found["torch sdpa"] = functools.partial(
      torch.nn.functional.scaled_dot_product_attention, is_causal=causal
    )
    if jax.default_backend() == "gpu":
      found["torch flex"] = _flex(length, causal)
  return found


def _jax_nn(
  implementation: Literal["cudnn", "xla"], causal: bool, query, key, value
) -> jax.Array:
  return jax.nn.dot_product_attention(
    query, key, value, is_causal=causal, implementation=implementation
  )


def _flex(length: int, causal: bool) -> Callable:
  flex = importlib.import_module("torch.nn.attention.flex_attention")
  compiled = torch.compile(flex.flex_attention)
  if not causal:
    return compiled
  block_mask = flex.create_block_mask(
    lambda batch, head, query, key: query >= key,
    *(None, None, length, length),
    device="cuda",
  )
  return functools.partial(compiled, block_mask=block_mask)


def additive() -> dict[str, Callable]:
  """Additive attention of tokens [B, H, T, D] with three arrays, by name."""
  found: dict[str, Callable] = {}
  implementations = {"pallas": "pallas", "dispatched": None}
  if jax.default_backend() == "cpu":
    del implementations["pallas"]
  for name, implementation in implementations.items():
    found[name] = functools.partial(_attend_additive, implementation)
  if has_torch():
    found["torch plain"] = peers.torch_additive
    if jax.default_backend() == "gpu":
      found["torch compiled"] = torch.compile(peers.torch_additive)
  return found


def _attend_additive(implementation, query, key, value, *weights) -> jax.Array:
  score = scores.additive(*weights)
  return attend(query, key, value, score=score, implementation=implementation)


def made(
  functions: dict[str, Callable],
  arguments: Sequence[jax.Array],
  direction: str,
  skip: Callable[[str, Exception], None],
) -> Iterator[Contender]:
  """The contenders that run; skip(name, error) is told of the others."""
  for name, function in functions.items():
    make = _of_torch if name.startswith("torch") else compiled
    own = arguments
    if name in _HEADS_LAST:
      own = [jnp.swapaxes(each, 1, 2) for each in arguments]
    try:
      contender = make(name, function, own, direction, calls=CALLS)
      contender.run()
    except Exception as error:  # of any library, also out of memory
      skip(name, error)
    else:
      yield contender


def _of_torch(name, function, arguments, direction, calls) -> Contender:
  gradient = direction != "forward"
  on_gpu = jax.default_backend() == "gpu"
  tensors = [
    torch.tensor(np.asarray(each, np.float32))
    .to("cuda" if on_gpu else "cpu", torch.bfloat16)
    .requires_grad_(gradient)
    for each in arguments
  ]
  with torch.no_grad():
    cotangent = torch.ones_like(function(*tensors))

  def run():
    with torch.set_grad_enabled(gradient):
      for _ in range(calls):
        results = function(*tensors)
        if gradient:
          results = torch.autograd.grad(results, tensors, cotangent)
    if on_gpu:
      torch.cuda.synchronize()
    return results

  return Contender(name, run)
