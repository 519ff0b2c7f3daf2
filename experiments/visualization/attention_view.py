"""Attention weights as a page that a browser opens from disk."""

import base64
import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.run_directory import write_text

_FOLDER = "explorer_page"
# Sides whose tokens are the rows and columns of the weights, by kind.
_SIDES = {
  "cross-attention": ("target", "source"),
  "encoder self-attention": ("source", "source"),
  "decoder self-attention": ("target", "target"),
}
_HEIGHT = 760  # pixels of the view in a notebook


class PairWeights(NamedTuple):
  """The attention weights of a model on one pair of source and target.

  Attributes:
    source: S tokens.
    target: T tokens; row t of the weights belongs to the prediction of target
      token t.
    weights: float32 arrays with L layers and H heads by kind of attention:
      "cross-attention" [L, H, T, S], "encoder self-attention" [L, H, S, S] and
      "decoder self-attention" [L, H, T, T], whose columns are the decoder's
      inputs: the start symbol, then the target.
    run: a name of the model.
    text: the source as text.
    translation: the target as text.
    gold: [T, S] gold alignments, 2 for sure and 1 for possible ones; None if
      unknown.
  """

  source: Sequence[str]
  target: Sequence[str]
  weights: Mapping[str, np.ndarray]
  run: str = ""
  text: str = ""
  translation: str = ""
  gold: np.ndarray | None = None

  def _repr_html_(self) -> str:
    return attention_view(self)._repr_html_()


class AttentionView(NamedTuple):
  """An interactive page of attention weights, from `attention_view`.

  Attributes:
    page: HTML without references to other files.
    num_sentences: the number of sentences that it shows.
  """

  page: str
  num_sentences: int

  def save(self, path: Path) -> None:
    """Writes the page, and the folders of the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a pipe or a device
      path.write_text(self.page, encoding="utf-8")
    else:
      write_text(path.resolve(), self.page)

  def _repr_html_(self) -> str:
    """The page in a frame, which keeps its styles apart from a notebook's."""
    return (
      f'<iframe title="attention weights" srcdoc="{html.escape(self.page)}"'
      f' style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
    )

  def __repr__(self) -> str:
    return f"AttentionView(num_sentences={self.num_sentences})"


def attention_view(
  *pairs: PairWeights, title: str = "Attention weights"
) -> AttentionView:
  """Makes a page that shows attention weights, for a browser or a notebook.

  Args:
    *pairs: the weights of pairs; those with the same text, as of several runs,
      are shown side by side, others are sentences to choose from.
    title: the title of the page.

  Returns:
    The page. A notebook shows it as the value of a cell.

  Raises:
    ValueError: if there are no pairs, or weights do not fit their tokens.

  Example:
    >>> weights = np.array([[0.9, 0.1], [0.2, 0.8]])  # [T, S]
    >>> attention_view(
    ...   PairWeights(["we", "eat"], ["wir", "essen"],
    ...   {"cross-attention": weights[None, None]}),
    ... )
    AttentionView(num_sentences=1)
  """
  if not pairs:
    raise ValueError("attention_view needs at least one pair")
  sentences: dict[str, list[dict[str, Any]]] = {}
  for pair in pairs:
    text = pair.text or " ".join(pair.source)
    sentences.setdefault(text, []).append(_encoded(pair, text))
  data = {
    "sentences": [
      {"text": text, "pairs": found} for text, found in sentences.items()
    ]
  }
  # "<" could end the script element.
  encoded = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
  folder = importlib.resources.files(__package__) / _FOLDER
  page, style, script = (
    (folder / name).read_text(encoding="utf-8")
    for name in ("page.html", "style.css", "script.js")
  )
  values = {
    "title": html.escape(title),
    "style": style,
    "script": script,
    "data": encoded,
  }
  page = re.sub(r"{{(\w+)}}", lambda found: values[found[1]], page)
  return AttentionView(page, len(sentences))


def _encoded(pair: PairWeights, text: str) -> dict[str, Any]:
  """Returns a pair as JSON has it, with arrays as base64."""
  tokens = {"source": pair.source, "target": pair.target}
  weights = {}
  for kind, array in pair.weights.items():
    if kind not in _SIDES:
      known = ", ".join(_SIDES)
      raise ValueError(f"unknown kind of attention {kind!r}; known: {known}")
    rows, columns = (len(tokens[side]) for side in _SIDES[kind])
    if array.ndim != 4 or array.shape[2:] != (rows, columns):
      raise ValueError(
        f"weights of {kind} must be [L, H, {rows}, {columns}], got"
        f" {list(array.shape)}"
      )
    weights[kind] = {
      "shape": array.shape,
      "data": _base64(array, "<f4"),
      "signed": bool((array < 0).any()),
    }
  return {
    "run": pair.run,
    "text": text,
    "translation": pair.translation or " ".join(pair.target),
    "source": list(pair.source),
    "target": list(pair.target),
    "gold": None if pair.gold is None else _base64(pair.gold, "u1"),
    "weights": weights,
  }


def _base64(array: np.ndarray, dtype: str) -> str:
  return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()
