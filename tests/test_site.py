"""The documentation builds without warnings and has no broken links."""

import html.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest

import attention

ROOT = pathlib.Path(__file__).parents[1]


class Page(html.parser.HTMLParser):
  """The links of a page, and its anchors."""

  def __init__(self, path: pathlib.Path):
    super().__init__()
    self.links: list[str] = []
    self.ids: set[str] = set()
    self.feed(path.read_text(encoding="utf-8"))

  def handle_starttag(self, tag, attributes):
    found = dict(attributes)
    self.ids |= {found["id"]} if "id" in found else set()
    self.links += [found[name] for name in ("href", "src") if found.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  folder = tmp_path_factory.mktemp("site")
  command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
  done = subprocess.run(
    [*command, "-d", str(folder / "cache"), "docs", str(folder / "html")],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return folder / "html"


@pytest.mark.exhaustive
def test_no_link_within_the_site_is_broken(site):
  pages = {path: Page(path) for path in site.rglob("*.html")}
  assert {"index.html", "story.html"} <= {path.name for path in pages}
  broken = []
  for path, page in pages.items():
    for link in page.links:
      parts = urlsplit(link)
      if parts.scheme or parts.netloc:
        continue
      target = path
      if parts.path:
        target = (path.parent / unquote(parts.path)).resolve()
      places = pages[target].ids if target in pages else set()
      is_place = parts.fragment in places or target.suffix != ".html"
      if not target.exists() or (parts.fragment and not is_place):
        broken.append(f"{path.relative_to(site)}: {link}")
  assert not broken


@pytest.mark.exhaustive
def test_the_gallery_embeds_pages_of_both_released_runs(tmp_path):
  """Builds the site in a copy, so that other tests build it without pages."""
  for name in ("Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
    shutil.copy(ROOT / name, tmp_path)
  for name in ("docs", "releases", "configs"):
    shutil.copytree(ROOT / name, tmp_path / name)
  for name in ("attention", "experiments", "benchmarks", "tests"):
    (tmp_path / name).symlink_to(ROOT / name)
  done = subprocess.run(
    ["make", "site", f"PYTHON={sys.executable}"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  folder = tmp_path / "build" / "site"
  links = Page(folder / "gallery.html").links
  for name in ("reverse", "numbers"):
    assert links.count(f"gallery/{name}.html") == 2  # embedded, and linked
    assert (folder / "gallery" / f"{name}.html").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_every_public_name_is_documented(site):
  found = Page(site / "api" / "attention.html").ids
  for name in attention.__all__:
    if callable(getattr(attention, name)):
      modules = ("attention", "attention.scores")
      assert any(f"{module}.{name}" in found for module in modules), name
  modules = ("scores", "masks", "biases", "positions", "modules", "cache")
  for module in (*modules, "ring"):
    package = getattr(attention, module)
    for name in package.__all__:
      if callable(getattr(package, name)):
        assert f"attention.{module}.{name}" in found, f"{module}.{name}"


@pytest.mark.exhaustive
def test_the_page_of_config_fields_has_their_tables(site):
  page = (site / "api" / "config.html").read_text(encoding="utf-8")
  assert '<span class="pre">attention_implementation</span>' in page
  assert Page(site / "api" / "config.html").ids >= {"config-train"}


@pytest.mark.exhaustive
def test_pages_of_the_experiments_list_functions(site):
  text = (ROOT / "docs" / "api" / "experiments.md").read_text()
  found = Page(site / "api" / "experiments.html").ids
  for module in re.findall("automodule:: (.+)", text):
    assert any(name.startswith(f"{module}.") for name in found), module
