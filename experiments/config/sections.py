"""What every section of a config is, and the types of its fields."""

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
AttentionName = Literal["none", ScoreName]


class Section(pydantic.BaseModel):
  """A frozen group of fields; what it does not know, it refuses."""

  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, frozen=True, allow_inf_nan=False
  )
