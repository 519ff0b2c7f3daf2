"""Ring attention: a device's temporaries, time, and the largest error."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import attend, masks, ring_attention
from attention.ring import arrange, restore
from benchmarks.mesh import apart

LENGTH, TIMED = 32_768, 8_192
ORDER: Any = "zigzag"
_MASKS = {"full": None, "causal": masks.causal()}
_SHARE = jax.P(None, None, "s")


def measure() -> dict[str, dict[str, float]]:
  """MiB of temporaries a device, time and error, by case, on all devices.

  Returns:
    Of each mask, forwards and backwards: "MiB" as XLA plans them for LENGTH
    tokens, "ms" for TIMED tokens, and with several devices "error", the largest
    of a head at LENGTH tokens.

  Example:
    >>> measure()["full forward"]["MiB"]  # doctest: +SKIP
    7.8
  """
  axis = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((jax.device_count(),), ("s",), axis_types=axis)
  place = jax.NamedSharding(mesh, _SHARE)
  found: dict[str, dict[str, float]] = {}
  for name, mask in _MASKS.items():
    alone, around = _alone(mask), _around(mask, mesh)
    several = mesh.size > 1
    for what, made in (("forward", lambda f: f), ("gradient", _gradient)):
      run = made(around if several else alone)
      memory: Any = _compiled(run, LENGTH, place).memory_analysis()
      case = found[f"{name} {what}"] = {
        "MiB": memory.temp_size_in_bytes / 2**20,
        "ms": _milliseconds(run, place),
      }
      if several:
        case["error"] = _largest_error(run, made(alone), place)
  return found


def _alone(mask):
  return lambda *tokens: attend(*tokens, mask=mask)


def _around(mask, mesh):
  def look(*tokens):
    return ring_attention(*tokens, axis_name="s", mask=mask, order=ORDER)

  return jax.shard_map(look, mesh=mesh, in_specs=_SHARE, out_specs=_SHARE)


def _gradient(function):
  """The gradients by all arguments of a sum that no term drops out of."""
  return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))


def _compiled(function, length, place):
  tokens = jax.ShapeDtypeStruct((1, 8, length, 64), "float32", sharding=place)
  return jax.jit(function).lower(tokens, tokens, tokens).compile()


def _tokens(heads, length):
  shape = (3, 1, heads, length, 64)
  return list(jax.random.normal(jax.random.key(0), shape))


def _milliseconds(function, place) -> float:
  """The median of five calls after one."""
  compiled = _compiled(function, TIMED, place)
  arguments = jax.device_put(_tokens(8, TIMED), place)
  times = []
  for _ in range(6):
    begin = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    times.append(1e3 * (time.perf_counter() - begin))
  return statistics.median(times[1:])


def _largest_error(run, alone, place) -> float:
  given, count = _tokens(1, LENGTH), place.mesh.size
  laid = [arrange(each, count, axis=-2, order=ORDER) for each in given]
  got = jax.tree.leaves(jax.jit(run)(*jax.device_put(laid, place)))
  want = jax.device_get(jax.tree.leaves(jax.jit(alone)(*given)))
  return max(
    float(np.max(np.abs(restore(a, count, axis=-2, order=ORDER) - b)))
    for a, b in zip(got, want)
  )


if __name__ == "__main__":
  apart.report(measure)
