"""The message about a field of a config that does not exist."""

from collections.abc import Iterable

from experiments.config.model import Seq2SeqConfig, TransformerConfig
from experiments.errors import suggestion

# The field of the score, of an RNN and of a Transformer.
_OTHER_NAMES = {"attention": "score", "score": "attention"}


def no_such_field(field: str, known: Iterable[str]) -> str:
  """Returns the message about a field that is not one of its section."""
  known = set(known)
  section, _, name = field.rpartition(".")
  message = f"{field}: no such field"
  if section != "config.model":
    return f"{message}{suggestion(name, known)}"
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
  return f"{message}{suggestion(name, known)}"
