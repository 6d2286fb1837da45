"""Fixtures for the tests of BoxLite's backend that need no virtual machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.own_folders import own_folders


@pytest.fixture(autouse=True)
def own_dirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of this test's own. A broker that finds its socket gone ends."""
    monkeypatch.delenv("BOXLITE_HOME", raising=False)
    monkeypatch.delenv("BOXLITE_REST_URL", raising=False)
    with own_folders() as folder:
        yield folder
