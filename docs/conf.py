"""How the documents become a site: `python -m sphinx -W docs build/site`."""

import importlib.metadata
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

project = "attention"
author = "the authors of attention"
release = importlib.metadata.version("attention-jax")
html_title = "attention"

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
]

myst_heading_anchors = 3

# Docstrings give shapes, which types do not. `name` is a link if it exists.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 76
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
toc_object_entries_show_parents = "hide"
add_module_names = False

highlight_language = "none"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False


# The gallery's pages, if `make gallery` has written them.
_PAGES = pathlib.Path(__file__).parents[1] / "build" / "pages"
html_extra_path = [str(_PAGES)] if _PAGES.exists() else []


# The page of config fields, and the line that they replace.
_FIELDS_PAGE, _FIELDS = "api/config", "<!-- config_fields -->"


def setup(app):
  """Omits the default docstrings of a NamedTuple's fields; finds the gallery.

  Inserts the fields of configs.

  Args:
    app: Sphinx.
  """
  app.connect("autodoc-skip-member", _skip)
  app.connect("source-read", _insert_fields)
  # Their source is not the page, whose time Sphinx compares.
  app.connect("env-get-outdated", lambda *_: [_FIELDS_PAGE])
  if html_extra_path:
    app.tags.add("gallery")


def _insert_fields(app, page, source):
  del app
  if page == _FIELDS_PAGE:
    from docs.config_fields import config_fields

    source[0] = source[0].replace(_FIELDS, config_fields())


def _skip(app, what, name, obj, skip, options):
  del app, what, name, options
  return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for")
