"""Fixtures for the tests of images and packages: every test has its own data folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .inputs import make_rootfs


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The data folder. Its path is short, because there are sockets next to it."""
    with tempfile.TemporaryDirectory(prefix="sk-") as name:
        monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", f"{name}/data")
        monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", f"{name}/run")
        monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
        yield Path(name) / "data"


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A root file system like Debian's, with ipykernel, of a few files."""
    return make_rootfs(tmp_path / "rootfs", ipykernel=True)
