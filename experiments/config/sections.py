"""The base class of every config section, and the types of fields."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Literal

import pydantic
from pydantic import Field

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Rate = Annotated[float, Field(ge=0, lt=1)]
AtLeastZero = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
ScoreName = Literal[
  "dot", "scaled_dot", "general", "additive", "concat", "cosine"
]
RecurrentScoreName = Literal[ScoreName, "location", "local_m", "local_p"]
AttentionName = Literal["none", RecurrentScoreName]
TransformerScoreName = Literal[
  ScoreName,
  "location",
  "local_m",
  "local_p",
  "shaw",
  "disentangled",
  "transformer_xl",
  "forgetting",
]
NormalizerName = Literal[
  "softmax",
  "softmax_sink",
  "sigmoid",
  "softpick",
  "signed_softmax",
  "entmax",
  "sparsemax",
  "stick_breaking",
]
ImplementationName = Literal[
  "auto", "reference", "blockwise", "cudnn", "pallas"
]
# Marks a field or section that may be changed on an existing run, because the
# parameters do not depend on it.
CHANGEABLE = "changeable"


class Section(pydantic.BaseModel):
  """An immutable group of fields, from which `configs/base.py` is made."""

  model_config = pydantic.ConfigDict(
    extra="forbid",
    strict=True,
    frozen=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
  )


def suggestion(name: str, known: Iterable[str]) -> str:
  """Returns the end of a message: the known name that is most similar."""
  close = difflib.get_close_matches(name, known, n=1)
  return f"; did you mean {close[0]!r}?" if close else ""
