"""Pictures: weights where they belong, words in any script."""

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from experiments.visualization import fonts, plots
from experiments.visualization.plots import (
  AttentionPanel,
  save_attention_figure,
  save_attention_weights,
)

KOREAN = ["천이백삼십사만", "오천육백칠십팔"]
# For private use: no font of an operating system has them.
NOWHERE = "\U0010fff0\U0010fff1"


@pytest.fixture
def draw(tmp_path):
  """Draws panels, and reads the picture as [height, width] from 0 to 1."""

  def draw(*panels):
    path = tmp_path / "figures" / "alignments.png"
    save_attention_figure(panels, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return matplotlib.image.imread(path)[..., :3].mean(-1)

  return draw


def panel(weights, source=None, target=None, title=""):
  weights = np.asarray(weights, float)
  height, width = weights.shape
  source = source or [f"s{index}" for index in range(width)]
  target = target or [f"t{index}" for index in range(height)]
  return AttentionPanel(weights, source, target, title)


def changed(before, after):
  """Top, bottom, left and right of where two pictures differ."""
  rows, columns = np.nonzero(before != after)
  return rows.min(), rows.max() + 1, columns.min(), columns.max() + 1


def test_cells_are_where_the_weights_are_and_as_light(draw):
  dark, light = draw(panel(np.zeros((4, 3)))), draw(panel(np.ones((4, 3))))
  top, bottom, left, right = changed(dark, light)
  height, width = (bottom - top) / 4, (right - left) / 3
  for t, s in ((0, 0), (3, 0), (1, 2)):
    weights = np.zeros((4, 3))
    weights[t, s] = 1
    picture = draw(panel(weights))
    np.testing.assert_allclose(
      changed(dark, picture),
      (
        top + t * height,
        top + (t + 1) * height,
        left + s * width,
        left + (s + 1) * width,
      ),
      atol=2,
    )
    middle = int(top + (t + 0.5) * height), int(left + (s + 0.5) * width)
    assert dark[middle] == 0
    assert picture[middle] == light[middle] == 1


def test_weights_between_are_grey(draw):
  dark, light = draw(panel([[0]])), draw(panel([[1]]))
  top, bottom, left, right = changed(dark, light)
  # Not the middle itself, where two halves of the picture may meet.
  place = (top + bottom) // 2 + 3, (left + right) // 2 + 3
  levels = [draw(panel([[weight]]))[place] for weight in (0.25, 0.5, 0.75)]
  np.testing.assert_allclose(levels, [0.25, 0.5, 0.75], atol=0.01)


def test_panels_are_drawn_from_left_to_right_in_rows_of_four(draw):
  panels = [panel(np.zeros((2, 2)), title=f"head {n}") for n in range(5)]
  before = draw(*panels)
  tops, lefts = [], []
  for index in range(5):
    after = list(panels)
    after[index] = panel(np.ones((2, 2)), title=f"head {index}")
    top, _, left, _ = changed(before, draw(*after))
    tops.append(top)
    lefts.append(left)
  assert tops[:4] == [tops[0]] * 4
  assert lefts[:4] == sorted(set(lefts[:4]))
  assert tops[4] > tops[0]
  assert lefts[4] == lefts[0]


@pytest.mark.parametrize("count", [5, 60])
def test_every_label_has_a_line_of_its_own(draw, count):
  dark = draw(panel(np.zeros((count, count))))
  top, bottom, left, right = changed(dark, draw(panel(np.ones((count, count)))))
  line = 7 / 72 * 120  # pixels of a letter of 7 points
  assert (bottom - top) / count > line
  assert (right - left) / count > line


def test_a_picture_has_room_for_long_words_and_an_end(draw):
  short = draw(panel(np.zeros((3, 3))))
  long = draw(panel(np.zeros((3, 3)), ["s" * 20] * 3, ["t" * 25] * 3))
  assert long.shape[0] > short.shape[0] + 100
  assert long.shape[1] > short.shape[1] + 100
  endless = draw(panel(np.zeros((400, 300)), ["s" * 999] * 300))
  assert max(endless.shape) < 22 * 120


def test_resolution_is_limited(draw, monkeypatch):
  monkeypatch.setattr(plots, "_MAX_PIXELS", 200)
  assert max(draw(panel(np.zeros((9, 3)))).shape) == 200


def test_all_words_of_sixty_are_written_and_some_of_more(draw):
  def picture(count, name, place):
    words = ["w"] * count
    words[place] = name
    return draw(panel(np.zeros((1, count)), words))

  assert (picture(60, "w", 1) != picture(60, "v", 1)).any()
  assert (picture(130, "w", 3) != picture(130, "v", 3)).any()
  assert (picture(130, "w", 1) == picture(130, "v", 1)).all()


@pytest.mark.parametrize("other", [KOREAN[::-1], ["만사십삼백이천", KOREAN[1]]])
def test_korean_words_are_drawn_as_themselves(draw, other):
  # A missing character is the same box whichever it is; and pytest makes
  # matplotlib's warning of it an error.
  here = draw(panel(np.eye(2), KOREAN, KOREAN))
  assert (here != draw(panel(np.eye(2), other, KOREAN))).any()
  assert (here != draw(panel(np.eye(2), KOREAN, other))).any()


def test_dollars_are_dollars(draw):
  plain = draw(panel(np.eye(2), ["x", "y"], ["z", "frac"], "t"))
  signs = draw(panel(np.eye(2), ["$x$", "$y"], ["z", r"$\frac$"], "$t$"))
  assert plain.shape != signs.shape or (plain != signs).any()


def test_characters_that_no_font_has_are_told_once(draw, caplog):
  drawn = draw(panel(np.eye(2), list(NOWHERE), ["a", NOWHERE]))
  (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
  message = record.getMessage()
  for character in NOWHERE:
    assert f"{character} (U+{ord(character):X})" in message
  assert "install" in message
  replaced = ["\ufffd"] * 2
  expected = draw(panel(np.eye(2), replaced, ["a", "\ufffd\ufffd"]))
  np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("text", ["".join(KOREAN), "中文", "にほんご", "십é"])
def test_families_have_the_characters(text):
  before = dict(matplotlib.rcParams)
  families = fonts.families_for(text)
  assert dict(matplotlib.rcParams) == before
  faces = [
    font_manager.get_font(
      font_manager.findfont(family, fallback_to_default=False)
    )
    for family in families
  ]
  for character in text:
    assert any(face.get_char_index(ord(character)) for face in faces)
  assert fonts.undrawable(text, families) == ""


@pytest.mark.parametrize("text", ["", "zwölf", "où", "двенадцать", "▁x</s>"])
def test_no_font_is_added_where_none_is_needed(text):
  assert fonts.families_for(text) == ["DejaVu Sans"]


def test_characters_that_no_family_has_are_listed():
  assert fonts.families_for(NOWHERE) == ["DejaVu Sans"]
  text = NOWHERE[::-1] + "a" + NOWHERE
  assert fonts.undrawable(text, ["DejaVu Sans"]) == NOWHERE
  assert fonts.undrawable("a십", ["No Such Family"]) == "a십"


@pytest.fixture
def new_font(tmp_path, monkeypatch):
  """A font, installed after matplotlib listed all of them."""
  builder = FontBuilder(1000, isTTF=True)
  builder.setupGlyphOrder([".notdef", "dot"])
  builder.setupCharacterMap({ord(NOWHERE[0]): "dot"})
  blank = TTGlyphPen(None).glyph()
  builder.setupGlyf({".notdef": blank, "dot": blank})
  builder.setupHorizontalMetrics({".notdef": (500, 0), "dot": (500, 0)})
  builder.setupHorizontalHeader(ascent=800, descent=-200)
  builder.setupNameTable({"familyName": "Nowhere", "styleName": "Regular"})
  builder.setupOS2()
  builder.setupPost()
  builder.save(tmp_path / "nowhere.ttf")
  (tmp_path / "broken.ttf").write_bytes(b"no font")
  files = [str(tmp_path / name) for name in ("broken.ttf", "nowhere.ttf")]
  manager = font_manager.fontManager
  monkeypatch.setattr(manager, "ttflist", list(manager.ttflist))
  monkeypatch.setattr(font_manager, "findSystemFonts", lambda: files)
  fonts._installed.cache_clear()
  yield "Nowhere"
  fonts._installed.cache_clear()


def test_a_font_installed_since_is_found(new_font):
  families = fonts.families_for(NOWHERE + "십")
  assert families == ["DejaVu Sans", "Noto Sans CJK JP", new_font]
  assert fonts.undrawable(NOWHERE, families) == NOWHERE[1]


def test_weights_are_read_back_without_pickle(tmp_path):
  rng = np.random.default_rng(0)
  one = panel(rng.random((3, 2)), KOREAN, ["a", "b", "</s>"], "layer 1, head 1")
  two = panel(rng.random((1, 2)), ["x", "y"], ["z"], "")
  path = tmp_path / "figures" / "weights.npz"
  save_attention_weights([one, two], path)
  with np.load(path, allow_pickle=False) as saved:
    arrays = dict(saved)
  assert set(arrays) == {"weights", "source", "target", "title"}
  assert arrays["weights"].dtype == np.float32
  assert arrays["weights"].shape == (2, 3, 2)
  np.testing.assert_array_equal(arrays["weights"][0], np.float32(one.weights))
  np.testing.assert_array_equal(
    arrays["weights"][1, :1], np.float32(two.weights)
  )
  assert not arrays["weights"][1, 1:].any()
  assert arrays["source"].tolist() == [KOREAN, ["x", "y"]]
  assert arrays["target"].tolist() == [["a", "b", "</s>"], ["z", "", ""]]
  assert arrays["title"].tolist() == ["layer 1, head 1", ""]
