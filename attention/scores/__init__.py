"""Scores: functions of the contents of a query and a key.

The functions `dot_score`, ... compute all scores [..., T, S]; if the shapes do
not fit, they raise AssertionError, which names the argument. The constructors
`dot`, `scaled_dot`, `general`, `additive`, `concat` and `cosine` bind a score's
parameters; the result is a pytree and a callable (query, key) -> scores, which
`attention.attend` computes with its fastest algorithm.
"""

from attention.head_parameters import MATRIX, SCALAR, VECTOR
from attention.scores.base import (
  FunctionScore,
  MappedKeys,
  Score,
  with_mapped_keys,
)
from attention.scores.classical import Additive as additive
from attention.scores.classical import Concat as concat
from attention.scores.classical import Cosine as cosine
from attention.scores.classical import Dot as dot
from attention.scores.classical import General as general
from attention.scores.classical import ScaledDot as scaled_dot
from attention.scores.functional import (
  additive_score,
  as_score,
  concat_score,
  cosine_score,
  dot_score,
  general_score,
  scaled_dot_score,
)

__all__ = [
  "MATRIX",
  "SCALAR",
  "VECTOR",
  "FunctionScore",
  "MappedKeys",
  "Score",
  "additive",
  "additive_score",
  "as_score",
  "concat",
  "concat_score",
  "cosine",
  "cosine_score",
  "dot",
  "dot_score",
  "general",
  "general_score",
  "scaled_dot",
  "scaled_dot_score",
  "with_mapped_keys",
]
