"""Fixtures for tests of notebooks: real kernels in the real local jail, on loops of the tests' own.

Every test has its own folders, and must leave nothing behind: no process, file, record, thread or
descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel import Notebook
from sandbox_kernel.sandboxes.local import bubblewrap
from tests.helpers.coroutines import RunCoroutine, on_own_loop
from tests.kernels.conftest import own_folder
from tests.kernels.live import Leftovers, files_in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = bubblewrap.why_not()
    here = Path(__file__).parent
    for item in items:
        if problem and item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture(scope="session")
def run_coroutine() -> RunCoroutine:
    """Callers have loops of their own."""
    return on_own_loop


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Open one notebook first: what a process keeps for good is no leak."""
    if bubblewrap.why_not():
        return
    with pytest.MonkeyPatch.context() as monkeypatch, own_folder(monkeypatch):
        asyncio.run(_open_one())


async def _open_one() -> None:
    async with Notebook.open() as notebook:
        await notebook.run("1")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This test's own folder; checks at the end that nothing is left in it or anywhere."""
    with own_folder(monkeypatch) as path:
        leftovers = Leftovers(path)
        yield path
        leftovers.check()
        assert not files_in(path / "data" / "notebooks")
