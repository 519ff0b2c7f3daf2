"""Random calls of `attend`: parts that other tests compute one at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from attention import biases, masks, normalizers, scores

HEADS = 2


@dataclasses.dataclass(frozen=True)
class Call:
  """A call, whose options are a function of its arrays."""

  label: str
  tokens: list[np.ndarray]
  arrays: list[np.ndarray]
  options: Callable[[Sequence[Any]], dict[str, Any]]


class _Parts:
  """The parts of a call, chosen one after the other."""

  def __init__(self, seed: int):
    self.random = np.random.default_rng(seed)
    self.names: list[str] = []
    self.arrays: list[np.ndarray] = []

  def floats(self, *shape, scale=0.3):
    return (scale * self.random.standard_normal(shape)).astype(np.float32)

  def integers(self, most, *shape):
    return self.random.integers(0, most, shape).astype(np.int32)

  def part(self, make, *arrays):
    """A function of all arrays that calls make with these."""
    first = len(self.arrays)
    self.arrays += arrays
    return lambda all_arrays: make(*all_arrays[first : first + len(arrays)])

  def choose(self, **choices):
    """The part that one of the functions makes."""
    name = self.random.choice([*choices])
    self.names.append(str(name))
    return choices[name]()


def random_call(seed: int, features: int, value_features: int) -> Call:
  """The call of a seed, with other sizes for each."""
  parts = _Parts(seed)
  sizes = [(70, 100), (130, 150), (100, 70), (1, 130)]
  length, keys = sizes[parts.random.integers(len(sizes))]
  score = _score(parts, keys, features)
  normalizer = _normalizer(parts)
  is_softmax = parts.names[-1] in ("softmax", "sink")
  wrapper = _wrapper(parts, features, with_predictions=is_softmax)
  mask = _mask(parts, length, keys)
  bias = _bias(parts, length, keys)
  rate = parts.random.choice([0.0, 0.0, 0.2])

  def options(arrays):
    return {
      "score": wrapper(arrays)(score(arrays)),
      "normalizer": normalizer(arrays),
      "mask": mask(arrays),
      "bias": bias(arrays),
      "dropout_rate": rate,
    }

  key_heads = parts.random.choice([HEADS, 1])
  shapes = (HEADS, length), (key_heads, keys), (key_heads, keys)
  tokens = [
    parts.floats(2, *shape, size, scale=1.0)
    for shape, size in zip(shapes, (features, features, value_features))
  ]
  label = f"{' '.join(parts.names)} {rate} {[x.shape for x in tokens]}"
  return Call(label, tokens, parts.arrays, options)


def _score(parts, keys, features):
  part, floats = parts.part, parts.floats
  h = [(), (HEADS,)][parts.random.integers(2)]
  square = floats(*h, features, features, scale=0.1)
  units = parts.random.choice([8, 64])
  weights = [floats(*h, features, units) for _ in range(2)]

  def distance(number):
    def score(query, key):
      gap = query[..., :, None, :] - key[..., None, :, :]
      return -0.1 * (1.0 + number) * jnp.abs(gap).sum(-1)

    return scores.as_score(score)

  def forgetting(gates):
    return scores.forgetting(scores.scaled_dot(), -jnp.abs(gates))

  return parts.choose(
    dot=lambda: part(lambda: scores.soft_cap(scores.dot(), 5.0)),
    scaled_dot=lambda: part(scores.scaled_dot),
    general=lambda: part(scores.general, square),
    additive=lambda: part(scores.additive, *weights, floats(*h, units)),
    concat=lambda: part(
      lambda first, second, vector: scores.concat(
        jnp.concatenate([first, second], -2), vector
      ),
      *(*weights, floats(*h, units)),
    ),
    cosine=lambda: part(lambda n: scores.cosine(3.0 + n), floats(*h)),
    manhattan=lambda: part(distance, floats()),
    shaw=lambda: part(scores.shaw, floats(*h, 21, features)),
    disentangled=lambda: part(
      scores.disentangled, *(floats(*h, 20, features) for _ in range(2))
    ),
    transformer_xl=lambda: part(
      scores.transformer_xl, square, floats(*h, features), floats(*h, features)
    ),
    location=lambda: part(scores.location, floats(*h, keys - 5, features)),
    forgetting=lambda: part(forgetting, floats(*h, keys)),
    qk_norm=lambda: part(
      lambda gain: scores.qk_norm(scores.scaled_dot(), 1.0 + gain),
      floats(features),
    ),
  )


def _wrapper(parts, features, *, with_predictions):
  part, floats = parts.part, parts.floats

  def of(wrap, *arrays):
    return part(lambda *own: lambda score: wrap(score, *own), *arrays)

  def nearer(numbers, query_positions, key_positions):
    return numbers - 0.1 * jnp.abs(query_positions - key_positions)

  def of_heads(numbers, batch, head, query_positions, key_positions):
    return numbers - 0.1 * head * (query_positions > key_positions) + batch

  choices = {
    "bare": lambda: of(lambda score: score),
    "soft_cap": lambda: of(lambda score: scores.soft_cap(score, 5.0)),
    "temperature": lambda: of(
      lambda score, x: scores.temperature(score, 1.0 + jnp.abs(x)),
      floats(HEADS),
    ),
    "modified": lambda: of(lambda score: scores.modified(score, nearer)),
    "indices": lambda: of(
      lambda score: scores.modified(score, of_heads, with_indices=True)
    ),
    "local_m": lambda: of(lambda score: scores.local(score, 40.0)),
  }
  if with_predictions:
    choices["local_p"] = lambda: of(
      lambda score, *own: scores.local(score, 40.0, *own),
      *(floats(features, 64, scale=0.2), floats(64, scale=1.0)),
    )
  return parts.choose(**choices)


def _normalizer(parts):
  part = parts.part
  of_heads = parts.floats(HEADS, scale=1.0)
  return parts.choose(
    softmax=lambda: part(normalizers.softmax),
    sink=lambda: part(normalizers.softmax, of_heads),
    softpick=lambda: part(normalizers.softpick),
    signed_softmax=lambda: part(normalizers.signed_softmax),
    sigmoid=lambda: part(normalizers.sigmoid, of_heads),
    entmax=lambda: part(normalizers.entmax),
    sparsemax=lambda: part(normalizers.sparsemax),
  )


def _mask(parts, length, keys):
  part = parts.part
  lengths = parts.integers(keys + 1, 2, 1)
  segments = [np.sort(parts.integers(3, 2, 1, size)) for size in (length, keys)]
  return parts.choose(
    unmasked=lambda: part(lambda: None),
    causal=lambda: part(lambda: masks.causal(keys - length)),
    padding=lambda: part(masks.padding, lengths),
    window=lambda: part(lambda: masks.sliding_window(50, 10)),
    segments=lambda: part(masks.segments, *segments),
    array=lambda: part(
      lambda array: array, parts.random.random((2, 1, length, keys)) < 0.5
    ),
    prefix=lambda: part(lambda: masks.prefix(30) | masks.causal()),
    causal_padding=lambda: part(
      lambda own: masks.causal(10) & masks.padding(own), lengths
    ),
    outside=lambda: part(lambda: ~masks.sliding_window(20, 20)),
  )


def _bias(parts, length, keys):
  part, floats = parts.part, parts.floats
  return parts.choose(
    unbiased=lambda: part(lambda: None),
    alibi=lambda: part(lambda: biases.alibi(HEADS)),
    t5=lambda: part(
      lambda table: biases.relative_position(table, max_distance=40),
      floats(8, HEADS),
    ),
    pairs=lambda: part(lambda array: array, floats(1, HEADS, length, keys)),
    keys=lambda: part(lambda array: array, floats(2, 1, 1, keys)),
  )
