"""Masks, biases, scores and normalizers for functions saved by `jax.export`.

Modules that attend import this one, which registers the types, so that objects
of them may be arguments of saved functions. Objects that hold a function of the
user may not: `masks.where`, `scores.as_score`, `positional` and `modified`.
"""

import dataclasses
import json
from typing import Any

from jax import export

from attention import biases, normalizers, positional
from attention.masks import types
from attention.normalizers import base as normalizers_base
from attention.normalizers import exponential, sparse
from attention.scores import (
  base,
  classical,
  decay,
  luong_local,
  placed_examples,
  relative,
  sinusoidal,
  wrappers,
)

_TYPES = (
  *(types.Band, types.Below, types.Segments, types.ArrayMask),
  *(types.Combined, types.Invert, types.MaskView),
  *(biases.Alibi, biases.ByBucket, biases.ArrayBias),
  *(biases.Sum, biases.Scaled, biases.BiasView),
  *(positional.Shift, positional.AtPositions),
  *(positional.GroupHeads, positional.SelectHeads),
  *(classical.Dot, classical.ScaledDot, classical.General),
  *(classical.Cosine, classical.Additive, classical.Concat),
  *(base.Placed, base.GroupedHeads, wrappers.MappedKeys),
  placed_examples.PlacedExamples,
  *(wrappers.SoftCap, wrappers.Temperature, wrappers.QueryKeyNorm),
  *(luong_local.Location, luong_local.Local, decay.Forgetting),
  *(relative.Shaw, relative.Disentangled, sinusoidal.TransformerXL),
  *(exponential.Softmax, exponential.Sigmoid, exponential.Softpick),
  *(exponential.SignedSoftmax, sparse.Entmax, sparse.Sparsemax),
  *(normalizers.stick_breaking, normalizers_base.GroupedHeads),
)


def _register(cls: type) -> None:
  """Registers a pytree whose static fields are numbers, strings or None."""
  export.register_pytree_node_serialization(
    cls,
    serialized_name=f"{cls.__module__}.{cls.__name__}",
    serialize_auxdata=lambda data: json.dumps(data).encode(),
    deserialize_auxdata=lambda data: _as_tuples(json.loads(data)),
    from_children=lambda data, children: _restored(cls, data, children),
  )


def _restored(cls: type, data: Any, children: Any) -> Any:
  """An object of the type, from its static fields and its children."""
  if cls in (types.Band, types.Below):
    traced, known = data
    return cls(**dict(known), **dict(zip(traced, children)))
  names: dict[bool, list[str]] = {True: [], False: []}
  for field in dataclasses.fields(cls):
    names[bool(field.metadata.get("static"))].append(field.name)
  return cls(
    **dict(zip(names[True], data)), **dict(zip(names[False], children))
  )


def _as_tuples(data: Any) -> Any:
  return tuple(map(_as_tuples, data)) if isinstance(data, list) else data


for _type in _TYPES:
  _register(_type)
