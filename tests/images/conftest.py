"""Fixtures for the tests of images and packages: every test has its own data folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.own_folders import own_folders

from .inputs import make_rootfs


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The data folder."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    with own_folders() as folder:
        yield folder / "data"


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A root file system like Debian's, with ipykernel, of a few files."""
    return make_rootfs(tmp_path / "rootfs", ipykernel=True)
