"""The table of default cases names tests that exist."""

import pathlib
import re

from tests.default_cases import DEFAULT_CASES

TESTS = pathlib.Path(__file__).parent


def test_every_entry_names_a_test():
  text = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
  defined = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
  assert set(DEFAULT_CASES) <= defined | {"story.md"}
