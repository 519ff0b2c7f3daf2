"""Masks, biases, scores and normalizers for functions saved by `jax.export`.

Modules that attend import this one, which registers the types, so that objects
of them may be arguments of saved functions. Objects that hold a function of the
user may not: `masks.where`, `scores.as_score`, `positional` and `modified`.
"""

import json
from typing import Any

from jax import export

from attention import normalizers
from attention.biases import types as biases
from attention.masks import types
from attention.normalizers import base as normalizers_base
from attention.normalizers import exponential, sparse
from attention.positional import base as positional
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


def _as_tuples(data: Any) -> Any:
  """JSON's lists as the tuples that they were."""
  return tuple(map(_as_tuples, data)) if isinstance(data, list) else data


def _package(of_type: type) -> str:
  """Its folder in `attention`; files may be renamed."""
  return ".".join(of_type.__module__.split(".")[:2])


# Static fields are numbers, strings or None.
for _type in _TYPES:
  export.register_pytree_node_serialization(
    _type,
    serialized_name=f"{_package(_type)}.{_type.__name__}",
    serialize_auxdata=lambda data: json.dumps(data).encode(),
    deserialize_auxdata=lambda data: _as_tuples(json.loads(data)),
  )
