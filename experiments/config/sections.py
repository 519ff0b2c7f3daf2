"""The base class of every config section, and the types of fields."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from attention.names import PositionalScoreName, ScoreName

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
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


# The field of the score, of an RNN and of a Transformer.
_OTHER_NAMES = {"attention": "score", "score": "attention"}


def no_such_field(field: str, known: Iterable[str]) -> str:
  """Returns the message about a field that is not one of its section."""
  known = set(known)
  section, _, name = field.rpartition(".")
  if section != "config.model" or _OTHER_NAMES.get(name) not in known:
    return f"{field}: no such field{suggestion(name, known)}"
  message = f"{field}: no such field; did you mean {_OTHER_NAMES[name]!r}?"
  if name == "score":
    message += " The argument of a config also sets it: configs/reverse.py:dot"
  return message


def suggestion(name: str, known: Iterable[str]) -> str:
  """Returns the end of a message: the known name that is most similar."""
  close = difflib.get_close_matches(name, known, n=1)
  return f"; did you mean {close[0]!r}?" if close else ""
