"""Figures: weights at their positions, labels in any script."""

import sys

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from absl import logging
from matplotlib import font_manager

from experiments.visualization import fonts, plots
from experiments.visualization.plots import (
  AttentionPanel,
  save_attention_figure,
  save_attention_weights,
)

KOREAN = ["천이백삼십사만", "오천육백칠십팔"]
# For private use: no font of an operating system has them.
NO_GLYPHS = "\U0010fff0\U0010fff1"


@pytest.fixture
def draw(tmp_path):
  """Draws panels, and reads the figure as [height, width] from 0 to 1."""

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
  """Top, bottom, left and right of the area in which two figures differ."""
  rows, columns = np.nonzero(before != after)
  return rows.min(), rows.max() + 1, columns.min(), columns.max() + 1


def test_each_weight_is_drawn_at_its_row_and_column(draw):
  dark, light = draw(panel(np.zeros((4, 3)))), draw(panel(np.ones((4, 3))))
  top, bottom, left, right = changed(dark, light)
  height, width = (bottom - top) / 4, (right - left) / 3
  for t, s in ((0, 0), (3, 0), (1, 2)):
    weights = np.zeros((4, 3))
    weights[t, s] = 1
    image = draw(panel(weights))
    np.testing.assert_allclose(
      changed(dark, image),
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
    assert image[middle] == light[middle] == 1


def test_grey_levels_are_proportional_to_weights(draw):
  dark, light = draw(panel([[0]])), draw(panel([[1]]))
  top, bottom, left, right = changed(dark, light)
  # Not the middle itself, where two halves of the image may meet.
  place = (top + bottom) // 2 + 3, (left + right) // 2 + 3
  levels = [draw(panel([[weight]]))[place] for weight in (0.25, 0.5, 0.75)]
  np.testing.assert_allclose(levels, [0.25, 0.5, 0.75], atol=0.01)


def test_negative_weights_are_red_and_positive_ones_blue(tmp_path):
  path = tmp_path / "alignments.png"
  colors = {}
  for weight in (-1, 0, 1):
    # The weight of -1 in each panel's corner gives all of them one scale.
    weights = np.full((9, 9), weight)
    weights[0, 0] = -1
    save_attention_figure([panel(weights)], path)
    image = matplotlib.image.imread(path)
    colors[weight] = image[image.shape[0] // 2, image.shape[1] // 2, :3]
  assert colors[-1][0] > colors[-1][2] + 0.2
  np.testing.assert_allclose(colors[0], 1.0, atol=0.05)
  assert colors[1][2] > colors[1][0] + 0.2


@pytest.mark.exhaustive
def test_panels_are_arranged_in_rows_of_four(draw):
  panels = [panel(np.zeros((2, 2)), title=f"head {n}") for n in range(5)]
  before = draw(*panels)
  corners = {}
  for index in (0, 3, 4):
    after = list(panels)
    after[index] = panel(np.ones((2, 2)), title=f"head {index}")
    top, _, left, _ = changed(before, draw(*after))
    corners[index] = top, left
  assert corners[3][0] == corners[0][0] < corners[4][0]
  assert corners[4][1] == corners[0][1] < corners[3][1]


@pytest.mark.parametrize(
  "count", [5, pytest.param(60, marks=pytest.mark.exhaustive)]
)
def test_labels_do_not_overlap(draw, count):
  dark = draw(panel(np.zeros((count, count))))
  top, bottom, left, right = changed(dark, draw(panel(np.ones((count, count)))))
  line = 7 / 72 * 120  # pixels of a letter of 7 points
  assert (bottom - top) / count > line
  assert (right - left) / count > line


@pytest.mark.exhaustive
def test_figure_grows_with_long_words_up_to_a_limit(draw):
  short = draw(panel(np.zeros((3, 3))))
  long = draw(panel(np.zeros((3, 3)), ["s" * 20] * 3, ["t" * 25] * 3))
  assert long.shape[0] > short.shape[0] + 100
  assert long.shape[1] > short.shape[1] + 100
  endless = draw(panel(np.zeros((400, 300)), ["s" * 999] * 300))
  assert max(endless.shape) < 22 * 120


def test_resolution_is_limited(draw, monkeypatch):
  monkeypatch.setattr(plots, "_MAX_PIXELS", 200)
  assert max(draw(panel(np.zeros((9, 3)))).shape) == 200


@pytest.mark.exhaustive
def test_axis_of_more_than_60_words_labels_every_nth(draw):
  def image(count, name, place):
    words = ["w"] * count
    words[place] = name
    return draw(panel(np.zeros((1, count)), words))

  assert (image(60, "w", 1) != image(60, "v", 1)).any()
  assert (image(130, "w", 3) != image(130, "v", 3)).any()
  assert (image(130, "w", 1) == image(130, "v", 1)).all()


@pytest.mark.parametrize("other", [KOREAN[::-1], ["만사십삼백이천", KOREAN[1]]])
def test_korean_words_are_drawn(draw, other):
  # Every missing glyph is the same box, so different words would look equal;
  # and pytest turns matplotlib's warning about it into an error.
  here = draw(panel(np.eye(2), KOREAN, KOREAN))
  assert (here != draw(panel(np.eye(2), other, KOREAN))).any()
  assert (here != draw(panel(np.eye(2), KOREAN, other))).any()


def test_dollar_signs_do_not_start_formulas(draw):
  plain = draw(panel(np.eye(2), ["x", "y"], ["z", "frac"], "t"))
  signs = draw(panel(np.eye(2), ["$x$", "$y"], ["z", r"$\frac$"], "$t$"))
  assert plain.shape != signs.shape or (plain != signs).any()


@pytest.fixture
def hints(monkeypatch):
  """The messages that `log_first_n` gets, at most one of which it logs."""
  found = []

  def log_first_n(level, message, number, *values):
    assert (level, number) == (logging.WARNING, 1)
    found.append(message % values)

  monkeypatch.setattr(logging, "log_first_n", log_first_n)
  return found


def test_missing_glyphs_are_replaced_and_logged(draw, hints):
  drawn = draw(panel(np.eye(2), list(NO_GLYPHS), ["a", NO_GLYPHS]))
  for character in NO_GLYPHS:
    assert f"{character} (U+{ord(character):X})" in hints[-1]
  assert "font.family in your matplotlibrc" in hints[0]
  replaced = ["\ufffd"] * 2
  expected = draw(panel(np.eye(2), replaced, ["a", "\ufffd\ufffd"]))
  np.testing.assert_array_equal(drawn, expected)


@pytest.fixture
def without_extra(monkeypatch):
  """A machine with matplotlib's own fonts only, without the extra `fonts`."""
  manager = font_manager.fontManager
  own = [f for f in manager.ttflist if f.name.startswith("DejaVu")]
  monkeypatch.setattr(manager, "ttflist", own)
  monkeypatch.setitem(sys.modules, "noto_cjk_sans_otc", None)
  fonts.families.cache_clear()
  yield
  fonts.families.cache_clear()


@pytest.mark.usefixtures("without_extra")
def test_the_hint_names_the_fonts_extra(draw, hints):
  drawn = draw(panel(np.eye(2), KOREAN, ["a", "b"]))
  assert "pip install -e '.[fonts]'" in hints[0]
  assert f"{KOREAN[0][0]} (U+" in hints[0]
  replaced = ["\ufffd" * len(word) for word in KOREAN]
  expected = draw(panel(np.eye(2), replaced, ["a", "b"]))
  np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize(
  "text", ["".join(KOREAN), "中文", "にほんご", "십é", "двенадцать", "▁x</s>"]
)
def test_characters_of_installed_fonts_are_not_missing(text, hints):
  assert fonts.drawable(text) == text
  assert not hints


def test_only_missing_characters_are_replaced(hints):
  assert fonts.drawable(f"a{NO_GLYPHS}b") == "a\ufffd\ufffdb"
  assert len(hints) == 1


@pytest.mark.usefixtures("without_extra")
def test_a_font_of_the_users_matplotlibrc_is_used():
  font = {"font.family": ["DejaVu Serif", "sans-serif"]}
  with matplotlib.rc_context(font):
    assert fonts.families() == font["font.family"]


def test_saved_weights_load_without_pickle(tmp_path):
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


def test_curves_of_one_figure_differ_in_more_than_their_colour():
  styles = [plots.style(number) for number in range(14)]
  assert len({tuple(style.items()) for style in styles}) == 14
  for number, style in enumerate(styles[1:]):
    marks = [(each["marker"], each["linestyle"]) for each in styles]
    assert marks[number] != marks[number + 1], style


def test_accuracy_by_length_has_one_legend_beside_its_panels(
  tmp_path, monkeypatch
):
  figures = []
  monkeypatch.setattr(
    plots, "save_figure", lambda figure, _: figures.append(figure)
  )
  rows = [
    {"length": length, "sequence_accuracy": 0.5, "token_accuracy": 0.9}
    for length in (1, 2)
  ]
  plots.save_accuracy_by_length(
    {"test": rows, "long": rows}, tmp_path / "a.png", title="reverse"
  )
  (figure,) = figures
  assert figure.get_suptitle() == "reverse"
  (legend,) = figure.legends
  assert [text.get_text() for text in legend.get_texts()] == ["test", "long"]
  assert all(axis.get_legend() is None for axis in figure.axes)
  figure.draw_without_rendering()
  panels = [axis.get_tightbbox() for axis in figure.axes]
  assert all(panel.x1 <= legend.get_window_extent().x0 for panel in panels)
