"""The page of attention weights, also as a browser shows it."""

import base64
import errno
import json
import os
import re

import numpy as np
import pytest

from experiments.data.gold_alignments import GoldAlignments
from experiments.evaluation.alignment_error import alignment_error_rate
from experiments.visualization.alignments import save_pair
from experiments.visualization.attention_view import PairWeights, attention_view
from tests.experiments.visualization.browser import CHROMIUM, Browser

VISIBLE = "document.querySelector('#gold').checkVisibility()"
SOURCE, TARGET = ["שני", "</script>", "&lt;"], ["두", "</s>"]


def make_pair(layers=2, heads=3, source=SOURCE, target=TARGET, **options):
  """A pair of random weights that are negative in the last head."""
  draw = np.random.default_rng(layers * heads).random
  sizes = {
    "cross-attention": (len(target), len(source)),
    "encoder self-attention": (len(source), len(source)),
    "decoder self-attention": (len(target), len(target)),
  }
  weights = {
    kind: draw((layers, heads, *size), np.float32)
    for kind, size in sizes.items()
  }
  weights["cross-attention"][:, -1] *= -1
  options = {"run": f"{layers} layers", "text": "a source"} | options
  return PairWeights(source, target, weights, **options)


def content(view):
  (text,) = re.findall(
    r'<script type="application/json" id="data">(.*)</script>', view.page
  )
  return json.loads(text)


def test_the_page_holds_tokens_and_weights_unchanged():
  gold = np.array([[2, 0, 1], [0, 0, 0]])
  pair = make_pair(gold=gold)
  view = attention_view(pair, title="<weights>")
  ((stored,),) = [each["pairs"] for each in content(view)["sentences"]]
  assert (stored["source"], stored["target"]) == (SOURCE, TARGET)
  for kind, array in pair.weights.items():
    data = base64.b64decode(stored["weights"][kind]["data"])
    assert stored["weights"][kind]["shape"] == list(array.shape)
    assert data == array.astype("<f4").tobytes()
  assert list(base64.b64decode(stored["gold"])) == gold.ravel().tolist()
  assert "<title>&lt;weights&gt;</title>" in view.page


def test_pairs_of_one_text_are_one_sentence():
  view = attention_view(
    make_pair(), make_pair(layers=1), make_pair(text="another")
  )
  sentences = content(view)["sentences"]
  assert [each["text"] for each in sentences] == ["a source", "another"]
  assert [len(each["pairs"]) for each in sentences] == [2, 1]
  assert repr(view) == "AttentionView(num_sentences=2)"


def test_a_notebook_shows_the_page_in_a_frame():
  html = make_pair()._repr_html_()
  assert html.startswith("<iframe")
  assert "<script>" not in html


@pytest.mark.parametrize(
  ("weights", "message"),
  [
    ({"attention": np.zeros((1, 1, 2, 3))}, "unknown kind of attention"),
    ({"cross-attention": np.zeros((1, 1, 3, 2))}, r"\[L, H, 2, 3\], got"),
    ({"cross-attention": np.zeros((2, 3))}, r"\[L, H, 2, 3\], got"),
  ],
)
def test_weights_that_do_not_fit_the_tokens_are_refused(weights, message):
  with pytest.raises(ValueError, match=message):
    attention_view(PairWeights(SOURCE, TARGET, weights))


def test_a_page_without_pairs_is_refused():
  with pytest.raises(ValueError, match="at least one pair"):
    attention_view()


def test_a_page_replaces_another_only_as_a_whole(tmp_path, monkeypatch):
  path, link = tmp_path / "page.html", tmp_path / "link.html"
  path.write_text("another page")
  link.symlink_to(path)

  def fail(_):
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*/page\.h"):
      attention_view(make_pair()).save(link)
  assert path.read_text() == "another page"
  attention_view(make_pair()).save(link)
  assert path.read_text().startswith("<!")
  assert {each.name for each in tmp_path.iterdir()} == {path.name, link.name}


def test_a_page_is_written_to_a_pipe(tmp_path):
  path = tmp_path / "page.html"
  os.mkfifo(path)
  reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
  attention_view(make_pair(1, 1)).save(path)
  assert os.read(reader, 10).startswith(b"<!")
  os.close(reader)
  assert path.is_fifo()


@pytest.fixture(scope="module")
def browser():
  if CHROMIUM is None:
    pytest.skip("needs Chromium")
  with Browser() as browser:
    yield browser


@pytest.fixture
def show(browser, tmp_path):
  """Opens a page of pairs, which must load no other file."""

  def show(*pairs, **options):
    path = tmp_path / "page.html"
    attention_view(*pairs).save(path)
    browser.open(path, **options)
    assert browser.requests == [path.as_uri()]
    return browser

  yield show
  assert browser.errors == []


def cells(browser, panel=1):
  """The weights of the heat map of a panel, [T, S]."""
  rows = browser.evaluate(
    f"[...document.querySelectorAll('.panel:nth-child({panel}) tbody tr')].map("
    "row => [...row.querySelectorAll('td')].map(each => each.dataset.weight))"
  )
  return np.array(rows, np.float32)


def text(browser, selector):
  return browser.evaluate(f"document.querySelector('{selector}').textContent")


def count(browser, selector):
  return browser.evaluate(f"document.querySelectorAll('{selector}').length")


@pytest.mark.exhaustive
def test_every_head_shows_the_numbers_of_the_npz(show, tmp_path):
  pair = make_pair()
  save_pair(pair, tmp_path / "000001")
  saved = np.load(tmp_path / "000001.npz")["weights"]
  browser = show(pair)
  for layer in range(2):
    for head in range(3):
      browser.evaluate(
        "document.querySelector('[aria-label="
        f'"layer {layer + 1}, head {head + 1}"]\').click()'
      )
      np.testing.assert_array_equal(cells(browser), saved[layer * 3 + head])


@pytest.mark.exhaustive
def test_the_last_button_of_a_layer_shows_the_mean_of_its_heads(show):
  pair = make_pair()
  browser = show(pair)
  name = "layer 1, mean of heads"
  browser.evaluate(f"document.querySelector('[aria-label=\"{name}\"]').click()")
  mean = pair.weights["cross-attention"][0].mean(0)
  np.testing.assert_allclose(cells(browser), mean, rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  "kind", ["encoder self-attention", "decoder self-attention"]
)
def test_every_kind_of_attention_can_be_chosen(show, kind):
  pair = make_pair()
  browser = show(pair)
  browser.evaluate(f"document.querySelector('[value=\"{kind}\"]').click()")
  np.testing.assert_array_equal(cells(browser), pair.weights[kind][1, 0])
  assert not browser.evaluate(VISIBLE), "gold alignments of self-attention"


@pytest.mark.exhaustive
def test_hover_and_focus_show_the_distribution_of_a_token(show):
  pair = make_pair()
  weights = pair.weights["cross-attention"][1, 0]
  browser = show(pair)
  lines = count(browser, "path")
  assert count(browser, ".bar") == 0
  browser.hover(".rows li:nth-child(2) .token")
  values = [
    text(browser, f".columns li:nth-child({s + 1}) .value") for s in range(3)
  ]
  assert values == [f"{weight:.2f}" for weight in weights[1]]
  assert count(browser, "path") < lines
  assert f"{TARGET[1]} attends to" in text(browser, ".readout")
  assert f"{weights[1].max():.3f}" in text(browser, ".readout")
  browser.hover("h1")
  assert count(browser, ".bar") == 0
  assert count(browser, "path") == lines
  browser.evaluate("document.querySelector('.columns .token').focus()")
  browser.press("ArrowDown")
  values = [
    text(browser, f".rows li:nth-child({t + 1}) .value") for t in range(2)
  ]
  assert values == [f"{weight:.2f}" for weight in weights[:, 1]]
  browser.evaluate("document.activeElement.click()")
  browser.hover(".rows li:nth-child(1) .token")
  assert SOURCE[1] in text(browser, ".readout b"), "a click keeps the token"
  browser.press("Escape")
  assert count(browser, ".bar") == 0


@pytest.mark.exhaustive
def test_arrow_keys_choose_layer_and_head(show):
  pair = make_pair()
  browser = show(pair)
  browser.evaluate("document.querySelector('[aria-checked=true]').focus()")
  browser.press("ArrowUp")
  browser.press("ArrowRight")
  np.testing.assert_array_equal(
    cells(browser), pair.weights["cross-attention"][0, 1]
  )


@pytest.mark.exhaustive
def test_alignments_are_marked_and_their_error_rate_is_that_of_evaluation(show):
  gold = np.array([[2, 0, 1], [0, 2, 0]])
  pair = make_pair(gold=gold)
  browser = show(pair)
  assert browser.evaluate(VISIBLE)
  assert count(browser, "td.gold") == 2
  assert count(browser, "td.possible") == 1
  rate = alignment_error_rate(
    [
      (
        pair.weights["cross-attention"][1, 0],
        GoldAlignments(gold == 2, gold > 0),
      )
    ]
  )
  assert f"error rate {100 * rate:.1f}%" in text(browser, ".readout")
  assert count(browser, "td.predicted") == 0
  browser.evaluate("document.querySelector('#predicted').click()")
  assert count(browser, "td.predicted") == 2
  browser.evaluate("document.querySelector('#gold').click()")
  assert count(browser, "td.gold") == 0


@pytest.mark.exhaustive
def test_runs_are_side_by_side_and_sentences_can_be_chosen(show):
  one, other = make_pair(), make_pair(layers=1, heads=1)
  third = make_pair(text="another", source=["x"], target=["y"])
  browser = show(one, other, third)
  np.testing.assert_array_equal(
    cells(browser, panel=2), other.weights["cross-attention"][0, 0]
  )
  browser.hover(".panel:nth-child(1) .rows li:nth-child(1) .token")
  assert count(browser, ".panel:nth-child(2) .bar") == len(SOURCE)
  browser.evaluate("document.querySelector('#next').click()")
  assert count(browser, ".panel") == 1
  assert cells(browser).shape == (1, 1)


@pytest.mark.exhaustive
def test_columns_of_a_right_to_left_source_begin_at_the_right(show):
  browser = show(make_pair())
  first, second = (
    browser.evaluate(
      f"document.querySelectorAll('th[scope=col]')[{index}]"
      ".getBoundingClientRect().x"
    )
    for index in (0, 1)
  )
  assert first > second


@pytest.mark.exhaustive
def test_a_run_without_attention_is_named(show):
  browser = show(
    PairWeights(SOURCE, TARGET, {}, run="none"),
    make_pair(text=" ".join(SOURCE)),
  )
  assert "no cross-attention" in text(browser, ".panel")
  assert count(browser, ".panel") == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_sentence_does_not_widen_the_page(show, width, dark):
  words = [f"word{index}" for index in range(60)]
  browser = show(make_pair(source=words, target=words), width=width, dark=dark)
  assert browser.evaluate("document.documentElement.scrollWidth") <= width
