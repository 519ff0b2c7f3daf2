"""Fonts for words in any script.

Matplotlib draws each character with the first font of a text's list that has
it, and its own font, DejaVu Sans, has no Hangul, Chinese, Japanese or Thai.
Noto Sans CJK, which comes with the installation, has the first three; for
others, whatever is installed on the machine is searched.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence

_DEFAULT = "DejaVu Sans"
# The first face of the file, and the only one that matplotlib sees before
# 3.11. It has the characters of all the others.
_BUNDLED = "Noto Sans CJK JP"


def families_for(text: str) -> list[str]:
  """Finds font families that together have a text's characters.

  Args:
    text: anything.

  Returns:
    What matplotlib takes as `fontfamily`: DejaVu Sans, and more where that
    lacks a character that another font has.

  Example:
    >>> families_for("zehn")
    ['DejaVu Sans']
    >>> families_for("zehn 십")
    ['DejaVu Sans', 'Noto Sans CJK JP']
  """
  families = [_DEFAULT]
  missing = set(undrawable(text, families))
  candidates = _candidates()
  while missing and (family := next(candidates, None)):
    found = missing & _characters(family)
    if found:
      families.append(family)
      missing -= found
  return families


def undrawable(text: str, families: Sequence[str]) -> str:
  """Lists the characters that no font of a list has.

  Args:
    text: anything.
    families: the fonts, as of `families_for`.

  Returns:
    Each such character once, sorted.

  Example:
    >>> undrawable("zehn 십", ["DejaVu Sans"])
    '십'
  """
  drawable = frozenset().union(*map(_characters, families))
  return "".join(sorted(set(text) - drawable))


def _candidates() -> Iterator[str]:
  """Families to try, in order, found only when they are asked for."""
  _add_bundled()
  yield _BUNDLED
  yield from _installed()


@functools.cache
def _add_bundled() -> None:
  from matplotlib import font_manager
  from noto_cjk_sans_otc import FONT_PATH

  font_manager.fontManager.addfont(str(FONT_PATH))


@functools.cache
def _installed() -> tuple[str, ...]:
  """Families of upright fonts of normal weight, Noto's first."""
  from matplotlib import font_manager

  manager = font_manager.fontManager
  # Matplotlib keeps a list of fonts from the day it was first imported.
  known = {font.fname for font in manager.ttflist}
  for path in set(font_manager.findSystemFonts()) - known:
    with contextlib.suppress(Exception):  # a font that it cannot read
      manager.addfont(path)
  names = {
    font.name
    for font in manager.ttflist
    if font.style == "normal"
    and font.weight in (400, "normal", "regular")
    # It has a box with a question mark for every character there is.
    and "lastresort" not in font.name.replace(" ", "").lower()
  }
  return tuple(sorted(names, key=lambda name: ("Noto Sans" not in name, name)))


@functools.cache
def _characters(family: str) -> frozenset[str]:
  """The characters of the font that matplotlib takes for a family."""
  from matplotlib import font_manager

  wanted = font_manager.FontProperties(family=[family])
  try:
    path = font_manager.findfont(
      # Rebuilding matplotlib's list would lose what was added to it.
      wanted,
      fallback_to_default=False,
      rebuild_if_missing=False,
    )
    return frozenset(map(chr, font_manager.get_font(path).get_charmap()))
  except (OSError, RuntimeError, ValueError):  # removed, or cannot be read
    return frozenset()
