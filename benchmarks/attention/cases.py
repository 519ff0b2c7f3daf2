"""The shapes, the scores and the arrays of the benchmark."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from benchmarks.attention import score_cases
from benchmarks.attention.score_cases import ScoreCase

SIZE = 64  # D, E and A


@dataclasses.dataclass(frozen=True)
class Grid:
  """The shapes of all sections; triples are [B, H, T]."""

  matmul: int = 2048
  dot: tuple[tuple[int, int, int], ...] = (
    (4, 8, 512),
    (1, 8, 2048),
    (1, 8, 4096),
  )
  # [B, H, T, D], of which T is no multiple of 512, or D is not 64.
  odd: tuple[tuple[int, int, int, int], ...] = (
    (1, 8, 1536, 80),
    (1, 8, 2000, 48),
    (1, 8, 3000, 64),
  )
  small: tuple[tuple[int, int, int], ...] = ((32, 8, 32), (8, 8, 128))
  causal: tuple[int, int, int] = (1, 8, 4096)
  window: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
  window_size: int = 256
  additive: tuple[int, int, int] = (1, 1, 2048)
  projected: tuple[int, int, int] = (1, 8, 2048)
  closure: tuple[int, int, int] = (1, 1, 2048)
  normalizers: tuple[int, int, int] = (1, 8, 2048)
  positional: tuple[int, int, int] = (1, 8, 2048)
  distances: int = 512
  memory: int = 16384
  scores: tuple[str, ...] = ()  # all
  accuracy: int = 2048
  hidden: int = 256
  curves: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
  heads: tuple[int, ...] = (128, 512, 2048, 8192)


QUICK = Grid(
  matmul=256,
  dot=((1, 2, 64),),
  odd=((1, 2, 40, 48),),
  small=((2, 2, 16),),
  causal=(1, 2, 64),
  window=(64, 128),
  window_size=16,
  additive=(1, 1, 64),
  projected=(1, 2, 64),
  closure=(1, 1, 64),
  normalizers=(1, 2, 64),
  positional=(1, 2, 64),
  distances=8,
  memory=128,
  scores=("scaled_dot", "additive"),
  accuracy=64,
  hidden=32,
  curves=(64,),
  heads=(32, 64),
)


SCORES = score_cases.classical(SIZE, SIZE) | {"closure": score_cases.MANHATTAN}


def draw(shape: Sequence[int], seed: int) -> jax.Array:
  """Unit-normal float32 values."""
  return jax.random.normal(jax.random.key(seed), tuple(shape), jnp.float32)


def tokens(shape: Sequence[int], size: int = SIZE) -> list[jax.Array]:
  """Query, key and value, [B, H, T, size] for [B, H, T]."""
  return [draw((*shape, size), seed) for seed in range(3)]


def parameters(case: ScoreCase) -> list[jax.Array]:
  """Arrays of a score, for which unit-normal tokens give unit variance."""
  return [
    draw(shape, seed) / math.sqrt(shape[0]) if shape else jnp.ones(())
    for seed, shape in enumerate(case.shapes, 10)
  ]


def title(shape: Sequence[int]) -> str:
  """A shape as text, such as 1x8x2048."""
  return "x".join(map(str, shape))
