"""Makes a notebook of the story: `python docs/notebook.py` runs docs/story.md.

Writes docs/story.ipynb with its output, and the pictures of docs/story/, each
of which the code before it draws.
"""

import base64
import doctest
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import nbclient
import nbformat
from nbformat import v4

DOCS = pathlib.Path(__file__).parent
STORY = DOCS / "story.md"
NOTEBOOK = DOCS / "story.ipynb"

# Code, and the picture that it draws.
_CODE = re.compile(
  r"^```python\n(?P<code>.*?)^```\n(?:\n!\[[^]]*\]\((?P<picture>[^)]+)\)\n)?",
  re.DOTALL | re.MULTILINE,
)


class Part(NamedTuple):
  """A piece of the story.

  Attributes:
    text: Markdown, or code as doctest has it.
    is_code: which.
    picture: what the code draws, as the text names it.
  """

  text: str
  is_code: bool = False
  picture: str | None = None

  @property
  def examples(self) -> list[doctest.Example]:
    """The code's lines and what they print."""
    return doctest.DocTestParser().get_examples(self.text)

  @property
  def cell(self) -> nbformat.NotebookNode:
    """The part as a cell of a notebook."""
    if not self.is_code:
      return v4.new_markdown_cell(self.text.strip())
    code = "".join(example.source for example in self.examples)
    cell = v4.new_code_cell(code.rstrip("\n"))
    if any(example.exc_msg for example in self.examples):
      cell.metadata["tags"] = ["raises-exception"]
    return cell


def parts(story: str) -> Iterator[Part]:
  r"""Splits a story into texts and code.

  Args:
    story: Markdown with ```python blocks of doctests.

  Yields:
    Texts and code, in order.

  Example:
    >>> [part.is_code for part in parts("A\n```python\n>>> 1\n1\n```\nB")]
    [False, True, False]
  """
  end = 0
  for block in _CODE.finditer(story):
    yield Part(story[end : block.start()])
    yield Part(block["code"], is_code=True, picture=block["picture"])
    end = block.end()
  yield Part(story[end:])


def executed(found: list[Part]) -> nbformat.NotebookNode:
  """Runs a story.

  Args:
    found: its parts.

  Returns:
    The notebook with what it prints and draws.

  Raises:
    CellExecutionError: if a line fails whose error the story does not show.

  Example:
    >>> executed([Part("Once.")]).cells[0].source
    'Once.'
  """
  notebook = v4.new_notebook(cells=[part.cell for part in found])
  for number, cell in enumerate(notebook.cells):
    cell.id = f"part-{number}"
  notebook.metadata["kernelspec"] = {
    "name": "python3",
    "display_name": "Python 3",
    "language": "python",
  }
  client = nbclient.NotebookClient(
    notebook,
    timeout=600,
    record_timing=False,
    kernel_name="python3",
    resources={"metadata": {"path": str(DOCS.parent)}},
  )
  return client.execute()


def picture(cell: nbformat.NotebookNode) -> bytes | None:
  """Returns what a cell drew.

  Args:
    cell: of code, executed.

  Returns:
    PNG, or None.

  Example:
    >>> picture(v4.new_code_cell("1"))
  """
  for output in cell.outputs:
    if "image/png" in output.get("data", {}):
      return base64.b64decode(output.data["image/png"])
  return None


def main() -> None:
  """Runs the story; writes the notebook and its pictures."""
  found = list(parts(STORY.read_text(encoding="utf-8")))
  notebook = executed(found)
  nbformat.write(notebook, NOTEBOOK)
  for part, cell in zip(found, notebook.cells):
    if part.picture:
      drawn = picture(cell)
      if drawn is None:
        raise SystemExit(f"{STORY.name}: no code draws {part.picture}")
      path = DOCS / part.picture
      path.parent.mkdir(exist_ok=True)
      path.write_bytes(drawn)
  print(f"{NOTEBOOK}: {len(found)} cells")


if __name__ == "__main__":
  main()
