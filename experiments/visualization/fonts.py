"""Selects fonts for labels in any script.

Matplotlib draws each character with the first font in a list of families that
has a glyph for it. Its own font, DejaVu Sans, has no Hangul, Chinese, Japanese
or Thai. The optional extra `fonts` installs Noto Sans CJK, which has the first
three; for the rest, the fonts installed on the machine are searched.
"""

import contextlib
import functools
from collections.abc import Iterator

from absl import logging

_DEFAULT = "DejaVu Sans"
# The first face of the font file, which has the characters of all others.
# Matplotlib before 3.11 reads only this face.
_NOTO_CJK = "Noto Sans CJK JP"
REPLACEMENT = "\ufffd"
_warned: set[str] = set()


def families_for(text: str) -> tuple[list[str], str]:
  """The font families for a text, and its characters that no font has."""
  families = [_DEFAULT]
  missing = set(text) - _characters(_DEFAULT)
  candidates = _candidates()
  while missing and (family := next(candidates, None)):
    if found := missing & _characters(family):
      families.append(family)
      missing -= found
  return families, "".join(sorted(missing))


def warn_once(missing: str) -> None:
  """Logs once per process which fonts to install for the missing glyphs."""
  if _warned:
    return
  _warned.update(missing)
  names = [f"{c} (U+{ord(c):04X})" for c in missing[:10]]
  more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
  package = " pip install 'attention-jax[fonts]' for Chinese, Japanese and"
  extra = "" if has_noto_cjk() else f"{package} Korean, or"
  logging.warning(
    "figures show %s instead of %s%s: no installed font has a glyph;"
    "%s install a font for that script, such as its Noto Sans",
    REPLACEMENT,
    ", ".join(names),
    more,
    extra,
  )


@functools.cache
def has_noto_cjk() -> bool:
  """Adds the font of the extra `fonts` to matplotlib, if it is installed."""
  from matplotlib import font_manager

  try:
    from noto_cjk_sans_otc import FONT_PATH
  except ImportError:
    return False
  font_manager.fontManager.addfont(str(FONT_PATH))
  return True


def _candidates() -> Iterator[str]:
  """The families to search, in order; each is loaded when it is needed."""
  if has_noto_cjk():
    yield _NOTO_CJK
  yield from _installed()


@functools.cache
def _installed() -> tuple[str, ...]:
  """The families of upright fonts of normal weight, Noto Sans first."""
  from matplotlib import font_manager

  manager = font_manager.fontManager
  # Matplotlib caches a list of fonts, which may be older than some fonts.
  cached = {font.fname for font in manager.ttflist}
  for path in set(font_manager.findSystemFonts()) - cached:
    with contextlib.suppress(Exception):  # a font that it cannot read
      manager.addfont(path)
  names = {
    font.name
    for font in manager.ttflist
    if font.style == "normal"
    and font.weight in (400, "normal", "regular")
    # LastResort draws a box with a question mark for every character.
    and "lastresort" not in font.name.replace(" ", "").lower()
  }
  return tuple(sorted(names, key=lambda name: ("Noto Sans" not in name, name)))


@functools.cache
def _characters(family: str) -> frozenset[str]:
  """The characters of the font that matplotlib selects for a family."""
  from matplotlib import font_manager

  try:
    path = font_manager.findfont(
      font_manager.FontProperties(family=[family]),
      fallback_to_default=False,
      # Rebuilding matplotlib's list would remove the fonts added to it.
      rebuild_if_missing=False,
    )
    return frozenset(map(chr, font_manager.get_font(path).get_charmap()))
  except (OSError, RuntimeError, ValueError):  # removed, or cannot be read
    return frozenset()
