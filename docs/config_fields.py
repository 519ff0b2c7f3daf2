"""The fields of configs as Markdown, made from the classes that declare them.

`docs/conf.py` puts them on the page `docs/api/config.md`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.config import Config
from experiments.config.parse import changeable_fields

Schema = Mapping[str, Any]  # of JSON Schema

_TYPES = {
  "boolean": "True or False",
  "integer": "integer",
  "number": "number",
  "string": "text",
  "null": "None",
}
_BOUNDS = {
  "minimum": "at least",
  "exclusiveMinimum": "above",
  "maximum": "at most",
  "exclusiveMaximum": "below",
  "pattern": "that matches",
}


def config_fields() -> str:
  """Returns a heading and tables for each section of a config."""
  schema = Config.model_json_schema()
  top = schema["properties"]
  plain = {name: each for name, each in top.items() if not _sections(each)}
  parts = ["## config", _table("config", plain)]
  for name, each in top.items():
    if sections := _sections(each):
      parts += [f"## config.{name}", *_section(name, sections, schema["$defs"])]
  return "\n\n".join(parts)


def _section(
  name: str, sections: list[str], definitions: Schema
) -> Iterator[str]:
  """Yields the text and the table of each class of a section."""
  if len(sections) > 1:
    yield "`name` selects the fields:"
  nested = dict.fromkeys(
    inner
    for section in sections
    for each in definitions[section]["properties"].values()
    for inner in _sections(each)
  )
  for section in [*sections, *nested]:
    found = definitions[section]
    if len(sections) > 1:
      yield f"### {section}"
    yield found["description"]
    yield _table(f"config.{name}", found["properties"])


def _sections(schema: Schema) -> list[str]:
  """Returns the names of the sections to which a schema refers."""
  if "$ref" in schema:
    return [schema["$ref"].rpartition("/")[2]]
  inner = [*schema.get("oneOf", ())]
  inner += schema.get("patternProperties", {}).values()
  return [name for each in inner for name in _sections(each)]


def _table(path: str, fields: Schema) -> str:
  """Returns a table of the fields of a section."""
  changeable = {f"config.{field}" for field in changeable_fields()}
  rows = [("field", "type and range", "default", "meaning"), ("---",) * 4]
  for name, schema in fields.items():
    may_change = {path, f"{path}.{name}"} & changeable
    default = schema.get("default", "required")
    rows.append(
      (
        f"`{name}`" + "\\*" * bool(may_change),
        _type(schema),
        default if default == "required" else f"`{_value(default)}`",
        " ".join(schema.get("description", "").split()),
      )
    )
  lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
  return "\n".join(f"| {line} |" for line in lines)


def _type(schema: Schema) -> str:
  """Returns the type and the range of a field as text."""
  if sections := _sections(schema):
    link = " or ".join(f"[{each}](#{each.lower()})" for each in sections)
    return f"names, each with {link}" if "type" in schema else link
  if "anyOf" in schema:
    return " or ".join(map(_type, schema["anyOf"]))
  if "patternProperties" in schema:
    (inner,) = schema["patternProperties"].values()
    return f"names, each with {_type(inner)}"
  if values := schema.get("enum") or ("const" in schema and [schema["const"]]):
    return ", ".join(f"`{_value(value)}`" for value in values)
  bounds = [
    f"{words} `{schema[bound]}`"
    for bound, words in _BOUNDS.items()
    if bound in schema and schema[bound] != 2**31  # the limit of all sizes
  ]
  return " ".join([_TYPES[schema["type"]], " and ".join(bounds)]).strip()


def _value(value: Any) -> str:
  """Returns a value as Python writes it, text in double quotes."""
  if isinstance(value, dict):
    items = (f"{key}: {_value(inner)}" for key, inner in value.items())
    return f"{{{', '.join(items)}}}"
  return json.dumps(value) if isinstance(value, str) else repr(value)
