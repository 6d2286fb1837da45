"""Fixtures for the tests of the command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_kernel.sandboxes.local import bubblewrap
from tests.helpers.own_folders import own_folders

from .running import Cli


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """The command, with folders of its own."""
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    with own_folders() as folder:
        made = Cli(folder)
        yield made
        for path in made.records.glob("broken*.json"):
            path.unlink()
        made.remove_all()


@pytest.fixture
def jail(cli: Cli) -> str:
    """Name of a jail that runs."""
    problem = bubblewrap.why_not()
    if problem:
        pytest.skip(problem)
    cli.create("jail", memory_mib=512)
    return "jail"
