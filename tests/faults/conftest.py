"""Fixtures for kernels on bad links. What was injected is counted, and printed at the end."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.sandboxes.local import bubblewrap
from sandbox_kernel.tunnel import links, tunnel
from sandbox_kernel.tunnel.background import background_loop
from sandbox_kernel.wire import session
from tests.helpers.coroutines import finish, run_coroutine
from tests.helpers.rest import comes_to_rest
from tests.helpers.waiting import wait_until
from tests.kernels.conftest import KernelStarter, own_folder
from tests.kernels.live import folders_in, jail_processes

__all__ = ["run_coroutine"]  # the kernels live on the background loop

_SUMMARY = pytest.StashKey[list[str]]()
_TALLY = pytest.StashKey[Counter[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = bubblewrap.why_not()
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.faults)
            if problem:
                item.add_marker(pytest.mark.skip(reason=problem))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash.get(_SUMMARY, []):
        terminalreporter.write_line(line)
    if tally := config.stash.get(_TALLY, None):
        terminalreporter.write_line(
            f"{tally['faults']} planned faults on {tally['links']} links of {tally['kernels']} "
            f"kernels, under {tally['messages']} messages: none lost, doubled or reordered"
        )


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the end of the whole test run."""
    return request.config.stash.setdefault(_SUMMARY, [])


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Counter[str]:
    """Counts over all planned faults of the run, for its end."""
    return request.config.stash.setdefault(_TALLY, Counter())


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, over_the_wire: None) -> Iterator[Path]:
    """This test's own data and runtime folders, in which no sandbox may be left."""
    with own_folder(monkeypatch) as path:
        yield path
        wait_until(lambda: not jail_processes(path), "jails have ended", 20)
        assert not folders_in(path / "data" / "sandboxes")


@pytest.fixture
def start_kernel(folder: Path) -> Iterator[KernelStarter]:
    starter = KernelStarter()
    yield starter
    starter.shut_down()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host notices a dead link within seconds, so that a test need not wait for it."""
    monkeypatch.setattr(session, "PING_AFTER", 0.5)
    monkeypatch.setattr(session, "DEAD_AFTER", 2.0)
    monkeypatch.setattr(tunnel, "ALIVE_INTERVAL", 0.2)
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", 5.0)


@pytest.fixture(autouse=True)
def loop_errors() -> Iterator[list[str]]:
    """Exceptions that nobody caught on the background loop: there must be none."""
    found: list[str] = []
    loop = background_loop()
    loop.set_exception_handler(lambda _, context: found.append(repr(context)))
    yield found
    loop.call_soon_threadsafe(loop.set_exception_handler, None)
    assert not found


def assert_idle() -> None:
    """The background loop has nothing to do: it does not spin."""

    async def thread() -> int:
        return threading.get_native_id()

    comes_to_rest(os.getpid(), finish(thread()))
