"""Fixtures for tests with real kernels in the real local jail.

Every test has its own data and runtime folders, and must leave nothing behind: no process, file,
record, thread or descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client import KernelManager
from jupyter_core.utils import run_sync
from traitlets.config import Config

from sandbox_kernel.sandboxes.local import bubblewrap
from tests.helpers.own_folders import own_folders

from .live import PATIENCE, Leftovers, Live, restart_from_spare

StartKernel = Callable[..., Live]

FROM_SPARES = "SANDBOX_KERNEL_TEST_FROM_SPARES" in os.environ
"""Every kernel is a spare that was taken, wherever there is one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = bubblewrap.why_not()
    here = Path(__file__).parent
    for item in items:
        if problem and item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason=problem))


@contextlib.contextmanager
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with sandbox-kernel's and Jupyter's files."""
    for variable in [name for name in os.environ if name.startswith("SANDBOX_KERNEL_")]:
        monkeypatch.delenv(variable)
    with own_folders() as folder:
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
        monkeypatch.setenv("JUPYTER_PATH", str(folder / "share"))
        monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(folder / "config"))
        monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
        (folder / "jupyter").mkdir()
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Start one kernel first: what a process keeps for good (loops, pools) is no leak."""
    if bubblewrap.why_not():
        return
    with pytest.MonkeyPatch.context() as monkeypatch, own_folder(monkeypatch):
        start = KernelStarter()
        start()
        start.shut_down()
    zmq.Frame(b"", copy=False)  # starts pyzmq's own thread
    asyncio.run(_nested())


async def _nested(depth: int = 3) -> None:
    """A synchronous call in a running loop starts a thread of jupyter_core's own."""
    if depth:
        run_sync(_nested)(depth - 1)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This test's own folder; checks at the end that nothing is left in it or anywhere."""
    with own_folder(monkeypatch) as path:
        leftovers = Leftovers(path)
        yield path
        leftovers.check()


def install_kernelspec(folder: Path, name: str, argv: list[str], **config: Any) -> str:
    """A kernelspec for this test only, for a kernel in a sandbox; its name."""
    place = folder / "share" / "kernels" / name
    place.mkdir(parents=True)
    provisioner = {"provisioner_name": "sandbox", "config": config}
    spec: dict[str, Any] = {"argv": argv, "display_name": name, "language": "python"}
    spec["metadata"] = {"kernel_provisioner": provisioner}
    (place / "kernel.json").write_text(json.dumps(spec))
    return name


class KernelStarter:
    """Starts kernels, and shuts them down when the test is over."""

    def __init__(self) -> None:
        self.started: list[Live] = []

    def __call__(self, *, kernel_name: str = "sandbox", **settings: Any) -> Live:
        """``settings`` are the sandbox's, or (``manager=dict(...)``) the KernelManager's."""
        live = self.launch(kernel_name=kernel_name, **settings)
        live.client.wait_for_ready(timeout=PATIENCE)
        if FROM_SPARES and kernel_name == "sandbox" and set(settings) <= {"env", "egress"}:
            restart_from_spare(live.manager, live.client)
        return live

    def launch(self, *, kernel_name: str = "sandbox", **settings: Any) -> Live:
        """As above, without waiting for the kernel to be ready."""
        options = settings.pop("manager", {})
        manager = KernelManager(
            kernel_name=kernel_name, config=Config({"SandboxProvisioner": settings}), **options
        )
        manager.start_kernel()
        live = Live(manager, manager.client())
        self.started.append(live)
        live.client.start_channels()
        return live

    def shut_down(self) -> None:
        for live in self.started:
            live.client.stop_channels()
            if live.manager.has_kernel:
                live.manager.shutdown_kernel(now=True)
            live.manager.cleanup_resources()


@pytest.fixture
def start_kernel(folder: Path) -> Iterator[KernelStarter]:
    starter = KernelStarter()
    yield starter
    starter.shut_down()


@pytest.fixture
def live(start_kernel: StartKernel) -> Live:
    """A kernel in a sandbox, ready, with a client."""
    return start_kernel()
