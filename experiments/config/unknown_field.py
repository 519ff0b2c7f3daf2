"""The message about a field of a config that does not exist."""

import difflib
from collections.abc import Iterable

from experiments.config.model import Seq2SeqConfig, TransformerConfig

# The field of the score, of an RNN and of a Transformer.
_OTHER_NAMES = {"attention": "score", "score": "attention"}


def no_such_field(field: str, known: Iterable[str]) -> str:
  """Returns the message about a field that is not one of its section."""
  known = set(known)
  section, _, name = field.rpartition(".")
  message = f"{field}: no such field"
  if section != "config.model":
    return f"{message}{_similar(name, known)}"
  if _OTHER_NAMES.get(name) in known:
    message += f"; did you mean {_OTHER_NAMES[name]!r}?"
    if name == "score":
      message += (
        " The argument of a config also sets it: configs/reverse.py:dot"
      )
    return message
  for kind, fields in (
    ("an RNN", Seq2SeqConfig.model_fields),
    ("a Transformer", TransformerConfig.model_fields),
  ):
    if name in fields:
      return f"{message} of this model; {kind} has it"
  return f"{message}{_similar(name, known)}"


def _similar(name: str, known: Iterable[str]) -> str:
  close = difflib.get_close_matches(name, known, n=1)
  return f"; did you mean {close[0]!r}?" if close else ""
