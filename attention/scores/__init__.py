"""Scores: functions of the contents and positions of a query and a key.

The functions `dot_score`, ... compute all scores [..., T, S]; if the shapes do
not fit, they raise AssertionError, which names the argument. The constructors
`dot`, `scaled_dot`, `general`, `additive`, `concat` and `cosine` bind a score's
parameters; the result is a pytree and a callable (query, key) -> scores, which
`attention.attend` computes with its fastest algorithm.

`location`, `local`, `shaw`, `disentangled`, `transformer_xl` and `forgetting`
depend on positions too. `positional` makes such a score of a function, and
`modified`, `soft_cap`, `temperature` and `qk_norm` change another score. The
position of the first query and key is 0; `score.shifted(offset)` is the score
for queries that start at position `offset`.
"""

from attention.arrays.head_parameters import BY_POSITION, MATRIX, SCALAR, VECTOR
from attention.scores.base import Score
from attention.scores.callables import FunctionScore, modified, positional
from attention.scores.classical import Additive as additive
from attention.scores.classical import Concat as concat
from attention.scores.classical import Cosine as cosine
from attention.scores.classical import Dot as dot
from attention.scores.classical import General as general
from attention.scores.classical import ScaledDot as scaled_dot
from attention.scores.decay import forgetting
from attention.scores.functional import (
  additive_score,
  as_score,
  concat_score,
  cosine_score,
  dot_score,
  general_score,
  scaled_dot_score,
)
from attention.scores.luong_local import Local as local
from attention.scores.luong_local import Location as location
from attention.scores.relative import Disentangled as disentangled
from attention.scores.relative import Shaw as shaw
from attention.scores.sinusoidal import TransformerXL as transformer_xl
from attention.scores.tile_positions import Positions
from attention.scores.wrappers import MappedKeys, with_mapped_keys
from attention.scores.wrappers import QueryKeyNorm as qk_norm
from attention.scores.wrappers import SoftCap as soft_cap
from attention.scores.wrappers import Temperature as temperature

__all__ = [
  "BY_POSITION",
  "MATRIX",
  "SCALAR",
  "VECTOR",
  "FunctionScore",
  "MappedKeys",
  "Positions",
  "Score",
  "additive",
  "additive_score",
  "as_score",
  "concat",
  "concat_score",
  "cosine",
  "cosine_score",
  "disentangled",
  "dot",
  "dot_score",
  "forgetting",
  "general",
  "general_score",
  "local",
  "location",
  "modified",
  "positional",
  "qk_norm",
  "scaled_dot",
  "scaled_dot_score",
  "shaw",
  "soft_cap",
  "temperature",
  "transformer_xl",
  "with_mapped_keys",
]
