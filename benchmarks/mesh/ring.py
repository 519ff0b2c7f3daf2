"""Ring attention: temporary memory per device, time, and the largest error."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend, masks, ring_attention
from attention.ring import arrange, restore
from benchmarks.mesh import processes

LENGTH, TIMED = 32_768, 8_192
ORDER: Any = "zigzag"
_MASKS = {"full": None, "causal": masks.causal()}
_SPEC = jax.P(None, None, "s")


def measure() -> dict[str, dict[str, float]]:
  """Measures forward and gradient of each mask on all devices.

  Of each: "MiB" of temporaries per device, as planned by XLA for LENGTH tokens;
  "ms" for TIMED tokens; and with several devices the largest "error" of one
  head at LENGTH tokens.
  """
  axis = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((jax.device_count(),), ("s",), axis_types=axis)
  sharding = jax.NamedSharding(mesh, _SPEC)
  found: dict[str, dict[str, float]] = {}
  for name, mask in _MASKS.items():
    single, ring = _single(mask), _ring(mask, mesh)
    several = mesh.size > 1
    for what, made in (("forward", lambda f: f), ("gradient", _gradient)):
      run = made(ring if several else single)
      memory: Any = _compiled(run, LENGTH, sharding).memory_analysis()
      case = found[f"{name} {what}"] = {
        "MiB": memory.temp_size_in_bytes / 2**20,
        "ms": _milliseconds(run, sharding),
      }
      if several:
        case["error"] = _largest_error(run, made(single), sharding)
  return found


def _single(mask):
  return lambda *tokens: attend(*tokens, mask=mask)


def _ring(mask, mesh):
  def attention(*tokens):
    return ring_attention(*tokens, axis_name="s", mask=mask, order=ORDER)

  return jax.shard_map(attention, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC)


def _gradient(function):
  """Gradients with respect to all arguments, of a sum that uses every entry."""
  return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))


def _compiled(function, length, sharding):
  tokens = jax.ShapeDtypeStruct(
    (1, 8, length, 64), "float32", sharding=sharding
  )
  return jax.jit(function).lower(tokens, tokens, tokens).compile()


def _tokens(heads, length):
  shape = (3, 1, heads, length, 64)
  return list(jax.random.normal(jax.random.key(0), shape))


def _milliseconds(function, sharding) -> float:
  """The median of five calls, after a warm-up."""
  compiled = _compiled(function, TIMED, sharding)
  arguments = jax.device_put(_tokens(8, TIMED), sharding)
  times = []
  for _ in range(6):
    begin = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    times.append(1e3 * (time.perf_counter() - begin))
  return statistics.median(times[1:])


def _largest_error(run, single, sharding) -> float:
  tokens, count = _tokens(1, LENGTH), sharding.mesh.size
  arranged = [arrange(each, count, axis=-2, order=ORDER) for each in tokens]
  found = jax.tree.leaves(jax.jit(run)(*jax.device_put(arranged, sharding)))
  expected = jax.device_get(jax.tree.leaves(jax.jit(single)(*tokens)))
  return max(
    float(np.max(np.abs(restore(a, count, axis=-2, order=ORDER) - b)))
    for a, b in zip(found, expected)
  )


if __name__ == "__main__":
  processes.print_results(measure)
