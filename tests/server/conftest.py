"""Fixtures for tests with a real Jupyter Server. Each test has its own folders and sandboxes, and
leaves no sandbox behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_kernel.records import Records
from sandbox_kernel.sandboxes.local import LocalClient, bubblewrap
from tests.emulators.running import Running, started
from tests.helpers.waiting import wait_until
from tests.kernels.conftest import own_folder
from tests.kernels.live import jail_processes

from .running import JupyterServer

StartServer = Callable[..., JupyterServer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = bubblewrap.why_not()
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        item.add_marker(pytest.mark.timeout(600))  # several servers and sandboxes each
        if problem:
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_folder(monkeypatch) as path:
        (path / "root").mkdir()
        try:
            yield path
        finally:
            for record in Records().list("local"):
                asyncio.run(LocalClient().remove(record.name))
            wait_until(lambda: not jail_processes(path), "the end of all sandboxes")


@pytest.fixture
def make_server(folder: Path) -> Iterator[StartServer]:
    """Makes servers for ``<folder>/root``; what still runs is killed in the end."""
    made: list[JupyterServer] = []

    def make(*options: str, module: str = "jupyter_server") -> JupyterServer:
        made.append(JupyterServer(folder, folder / "root", *options, module=module))
        return made[-1]

    yield make
    for server in made:
        server.end(9)
        for connection in server.connections:
            connection.shutdown()


@pytest.fixture
def server(make_server: StartServer) -> JupyterServer:
    """A server that runs."""
    server = make_server()
    server.start()
    return server


@pytest.fixture
def service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Superserve's emulator, and kernels that run there."""
    with started("superserve") as running:
        for name, value in running.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SANDBOX_KERNEL_BACKEND", "superserve")
        monkeypatch.setenv("SANDBOX_KERNEL_LABEL", f"test-{secrets.token_hex(4)}")
        yield running


def statuses(service: Running) -> list[str]:
    """Of all sandboxes."""
    return [sandbox["status"] for sandbox in service.ask("GET", "/_emulator/sandboxes")]
