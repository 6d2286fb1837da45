"""Fixtures for the tests of BoxLite's backend that need no virtual machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_dirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of this test's own, with the short paths that sockets need."""
    folder = Path(tempfile.mkdtemp(prefix="sk-"))
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(folder / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.delenv("BOXLITE_HOME", raising=False)
    monkeypatch.delenv("BOXLITE_REST_URL", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a broker that finds its socket gone ends
