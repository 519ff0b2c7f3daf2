"""The fonts of labels, and a hint where they have no glyph for a character."""

import contextlib
import functools

from absl import logging

# Chinese, Japanese and Korean, installed by the optional extra `fonts`.
# The first face of the font file, which has the characters of all others.
# Matplotlib before 3.11 reads only this face.
_NOTO_CJK = "Noto Sans CJK JP"
_REPLACEMENT = "\ufffd"


@functools.cache
def families() -> list[str]:
  """Returns matplotlib's families and, where it is installed, Noto Sans CJK."""
  from matplotlib import font_manager, rcParams

  with contextlib.suppress(ImportError):
    from noto_cjk_sans_otc import FONT_PATH

    font_manager.fontManager.addfont(str(FONT_PATH))
  has_noto = _NOTO_CJK in font_manager.get_font_names()
  return rcParams["font.family"] + [_NOTO_CJK] * has_noto


def drawable(text: str) -> str:
  """Replaces the characters that no family has; logs a hint once."""
  missing = "".join(
    each
    for each in sorted(set(text))
    if not any(each in _characters(family) for family in families())
  )
  if missing:
    logging.log_first_n(
      logging.WARNING,
      "figures show %s instead of %s: no font has a glyph; run pip install -e"
      " '.[fonts]' for Chinese, Japanese and Korean, or add a font"
      " for that script to font.family in your matplotlibrc",
      1,
      _REPLACEMENT,
      ", ".join(f"{each} (U+{ord(each):04X})" for each in missing),
    )
  return "".join(_REPLACEMENT if each in missing else each for each in text)


@functools.cache
def _characters(family: str) -> frozenset[str]:
  from matplotlib import font_manager

  path = font_manager.findfont(font_manager.FontProperties(family=[family]))
  return frozenset(map(chr, font_manager.get_font(path).get_charmap()))
