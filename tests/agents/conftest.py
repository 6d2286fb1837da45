"""Fixtures for the tests of the API for pipelines and agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.local import LocalClient, bubblewrap
from tests.helpers.coroutines import finish, run_coroutine
from tests.helpers.own_folders import own_folders

__all__ = ["run_coroutine"]


@pytest.fixture
def own_dirs() -> Iterator[Path]:
    """Folders of the test's own."""
    with own_folders() as folder:
        yield folder


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    """The local backend; its sandboxes go with the test."""
    problem = bubblewrap.why_not()
    if problem:
        pytest.skip(problem)
    made = LocalClient()
    yield made
    for name in finish(made.list()):
        finish(made.remove(name))
