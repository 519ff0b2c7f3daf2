"""What the tests of implementations share."""

import pytest

from tests.attention.implementations.cudnn_stand_in import install


@pytest.fixture
def _stand_in(monkeypatch):
  install(monkeypatch)
