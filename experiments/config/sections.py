"""The base class of every config section, and the types of fields."""

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
# Marks a field or section that may be changed on an existing run: the
# parameters of any step do not depend on it.
CHANGEABLE = "changeable"


class Section(pydantic.BaseModel):
  """A frozen group of fields that rejects unknown fields.

  A field's type, range, default and description are declared together, once:
  `configs/base.py` is made from these declarations.
  """

  model_config = pydantic.ConfigDict(
    extra="forbid",
    strict=True,
    frozen=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
  )
