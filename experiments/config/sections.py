"""The base class of every config section, and the types of fields."""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from attention.names import PositionalScoreName, ScoreName

Positive = Annotated[int, Field(ge=1)]
# Sizes of arrays, for which JAX has 32 bits.
Size = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Rate = Annotated[float, Field(ge=0, lt=1)]
AtLeastZero = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
RecurrentScoreName = Literal[ScoreName, "location", "local_m", "local_p"]
AttentionName = Literal["none", RecurrentScoreName]
TransformerScoreName = Literal[ScoreName, PositionalScoreName, "forgetting"]
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
