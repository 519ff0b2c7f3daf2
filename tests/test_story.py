"""The notebook equals docs/story.md, which runs as an exhaustive doctest."""

import io
import re

import nbformat
import numpy as np
import pytest
from matplotlib import image

from docs import notebook

UPDATE = "run: python docs/notebook.py"


@pytest.fixture(scope="module")
def parts():
  return list(notebook.parts(notebook.STORY.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def cells():
  return nbformat.read(notebook.NOTEBOOK, as_version=4).cells


def test_notebook_has_the_text_and_code_of_the_story(parts, cells):
  assert [cell.source for cell in cells] == [
    part.cell.source for part in parts
  ], UPDATE


def test_notebook_output_equals_the_story(parts, cells):
  for part, cell in zip(parts, cells):
    if part.is_code and not any(x.exc_msg for x in part.examples):
      expected = "".join(example.want for example in part.examples)
      assert text_of(cell).strip() == expected.strip(), UPDATE
      assert all(x.get("name") != "stderr" for x in cell.outputs)


def text_of(cell):
  """The printed output of a cell, and its value unless that is a picture."""
  printed = "".join(x.get("text", "") for x in cell.outputs)
  values = [x.data["text/plain"] for x in cell.outputs if "data" in x]
  return printed + "".join(x for x in values if not x.startswith("<Figure"))


def test_pictures_equal_the_notebook_output(parts, cells):
  shown = 0
  for part, cell in zip(parts, cells):
    if part.is_code:
      drawn = notebook.picture(cell)
      assert (drawn is None) == (part.picture is None), part.text
      if drawn:
        shown += 1
        path = notebook.DOCS / part.picture
        assert path.read_bytes() == drawn, UPDATE
        pixels = image.imread(io.BytesIO(drawn))
        assert np.ptp(pixels[..., 0]) > 0.5  # not blank
  everywhere = re.findall(r"!\[", notebook.STORY.read_text(encoding="utf-8"))
  assert shown == len(everywhere) > 3


@pytest.mark.exhaustive
def test_executed_returns_a_notebook_with_pictures():
  found = list(
    notebook.parts(
      "Once.\n```python\n"
      ">>> import matplotlib.pyplot as plt\n"
      ">>> _ = plt.subplots()\n"
      ">>> 1 + 1\n2\n"
      "```\n\n![a picture](story/a.png)\n"
      "Then:\n```python\n>>> {}[0]\nTraceback (most recent call last):\n"
      "KeyError: 0\n```\nThe end.\n"
    )
  )
  assert [part.picture for part in found] == [None, "story/a.png", *[None] * 3]
  made = notebook.executed(found)
  assert made.cells[1].outputs[0].data["text/plain"] == "2"
  assert notebook.picture(made.cells[1]).startswith(b"\x89PNG")
  assert made.cells[3].outputs[0].ename == "KeyError"
