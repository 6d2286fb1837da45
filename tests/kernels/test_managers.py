"""Every kind of kernel manager, in every kind of program, without a leak."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client import (
    AsyncKernelManager,
    AsyncMultiKernelManager,
    KernelManager,
    MultiKernelManager,
)
from traitlets.config import Config

from sandbox_kernel.errors import SpecError, SpecRefused

from .conftest import KernelStarter, StartKernel, install_kernelspec
from .live import PATIENCE, jail_processes, provisioner_of, run_cell

PYTHON_ARGV = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]


def use_once() -> str:
    """Start a kernel, run a cell, shut it down; the cell's value."""
    starter = KernelStarter()
    try:
        return str(starter().ok("6 * 7").value)
    finally:
        starter.shut_down()


def test_from_a_thread_without_an_event_loop() -> None:
    """The synchronous manager needs no loop where it is called."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(use_once()))
    thread.start()
    thread.join(PATIENCE)
    assert found == ["42"]


def test_started_in_one_thread_used_in_another(start_kernel: StartKernel) -> None:
    """The tunnel belongs to no thread of the user's."""
    live = start_kernel()
    thread = threading.Thread(target=live.manager.restart_kernel, kwargs={"now": True})
    thread.start()
    thread.join(PATIENCE)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert live.ok("6 * 7").value == "42"


async def value_of(client: Any, code: str) -> str:
    """Run a cell through an asynchronous client."""
    values: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "execute_result":
            values.append(message["content"]["data"]["text/plain"])

    client.start_channels()
    await client.wait_for_ready(timeout=PATIENCE)
    await client.execute_interactive(code, output_hook=hook, timeout=PATIENCE)
    client.stop_channels()
    return values[0]


async def test_async_manager() -> None:
    """AsyncKernelManager: start, use, interrupt, restart, shut down."""
    manager = AsyncKernelManager(kernel_name="sandbox")
    await manager.start_kernel()
    client = manager.client()
    assert await value_of(client, "6 * 7") == "42"
    await manager.interrupt_kernel()
    await manager.restart_kernel(now=True)
    assert await value_of(manager.client(), "6 * 7") == "42"
    assert await manager.is_alive()
    await manager.shutdown_kernel()
    assert not await manager.is_alive()


def test_start_again_after_shutdown() -> None:
    """One manager, several lives: each in a sandbox of its own."""
    context = zmq.Context()
    manager = KernelManager(kernel_name="sandbox", context=context)
    names = set()
    for _ in range(2):
        manager.start_kernel()
        names.add(provisioner_of(manager).sandbox_name)
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE)
        assert run_cell(client, "6 * 7").value == "42"
        client.stop_channels()
        manager.shutdown_kernel()
    context.destroy(linger=0)
    assert len(names) == 2


def test_multi_kernel_manager() -> None:
    """Several kernels with several sandboxes."""
    manager = MultiKernelManager()
    ids = [manager.start_kernel(kernel_name="sandbox") for _ in range(2)]
    names = {provisioner_of(manager.get_kernel(i)).sandbox_name for i in ids}
    assert len(names) == 2
    assert all(manager.is_alive(i) for i in ids)
    manager.interrupt_kernel(ids[0])
    manager.shutdown_all(now=True)
    manager.context.destroy(linger=0)


@pytest.mark.slow
async def test_twenty_kernels_at_once(folder: Path) -> None:
    """All started at the same time, all at work at the same time."""
    manager = AsyncMultiKernelManager()
    ids = await asyncio.gather(*(manager.start_kernel(kernel_name="sandbox") for _ in range(20)))
    clients = [manager.get_kernel(i).client() for i in ids]
    values = await asyncio.gather(*(value_of(c, f"{n} ** 2") for n, c in enumerate(clients)))
    assert values == [str(n**2) for n in range(20)]
    await manager.shutdown_all(now=True)
    manager.context.destroy(linger=0)


FORK = """
import os, sys, threading
from tests.kernels.conftest import KernelStarter
starter = KernelStarter()
mine = starter()
mine.ok("x = 'the parent'")
child = os.fork()
if child == 0:
    def use():
        starter = KernelStarter()
        theirs = starter()
        value = theirs.ok("6 * 7").value
        starter.shut_down()
        os._exit(int(value))
    # jupyter_client keeps a loop a thread, which a fork would share.
    threading.Thread(target=use).start()
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    print(mine.ok("x").value)
    starter.shut_down()
"""


def test_fork(folder: Path) -> None:
    """A forked child has kernels of its own; those of its parent go on."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=root, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "'the parent'\n", done.stderr
    assert not jail_processes(folder)


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4])
async def test_start_cancelled(folder: Path, delay: float) -> None:
    """Wherever a start is cancelled, nothing of it stays, and the manager can start again."""
    manager = AsyncKernelManager(kernel_name="sandbox")
    start = asyncio.ensure_future(manager.start_kernel())
    await asyncio.wait([start], timeout=delay)
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await start
    await manager.shutdown_kernel(now=True)
    assert not jail_processes(folder)
    again = AsyncKernelManager(kernel_name="sandbox")
    await again.start_kernel()
    assert await value_of(again.client(), "6 * 7") == "42"
    await again.shutdown_kernel(now=True)


def test_shutdown_in_every_order() -> None:
    """Twice, before the client, after the kernel's death, or without a start."""
    never = KernelManager(kernel_name="sandbox")
    never.shutdown_kernel(now=True)

    starter = KernelStarter()
    first, second, third = starter(), starter(), starter()
    first.manager.shutdown_kernel()
    first.client.stop_channels()
    first.manager.shutdown_kernel(now=True)
    second.client.stop_channels()
    second.manager.shutdown_kernel(now=True)
    third.client.shutdown()
    third.manager.shutdown_kernel(restart=False)
    starter.shut_down()


# --- configuration


def test_which_setting_wins(
    start_kernel: StartKernel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernelspec is weakest, then traitlets configuration, then the environment."""
    name = install_kernelspec(
        folder, "configured", PYTHON_ARGV, memory_mib=501, processes=201, lease_seconds=1001
    )
    monkeypatch.setenv("SANDBOX_KERNEL_LEASE_SECONDS", "1003")
    live = start_kernel(kernel_name=name, processes=202, lease_seconds=1002)
    spec = live.kernel.handle.spec
    assert (spec.memory_mib, spec.processes, spec.lease_seconds) == (501, 202, 1003)


def test_environment_of_the_kernel(
    start_kernel: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel sees the variables that its settings name, and none of the host's others."""
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    live = start_kernel(env={"GREETING": "hello"})
    seen = live.ok("import os, json; print(json.dumps(dict(os.environ)))").text()
    environment = json.loads(seen)
    assert environment["GREETING"] == "hello"
    assert "HOST_SECRET" not in environment


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"secrets": ["TOKEN"]}, SpecRefused, "cannot enforce secrets="),
        ({"image": "python:3.12"}, SpecRefused, "cannot enforce image="),
        ({"memory_mib": "much"}, SpecError, "memory_mib takes a whole number, not 'much'"),
        ({"backend": "nimbus"}, SpecError, "There is no sandbox backend 'nimbus'"),
        ({"guest_transport": "udp"}, SpecError, "guest_transport is 'ipc' or 'tcp'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(
    settings: dict[str, Any], error: type[Exception], words: str, folder: Path
) -> None:
    """A clear error, and no sandbox."""
    manager = KernelManager(kernel_name="sandbox", config=Config({"SandboxProvisioner": settings}))
    with pytest.raises(error, match=words):
        manager.start_kernel()
    manager.cleanup_resources()
    assert not jail_processes(folder)


def test_unknown_key_in_a_kernelspec(folder: Path) -> None:
    """A key that is not known is named, with the one that was meant."""
    name = install_kernelspec(folder, "mistyped", PYTHON_ARGV, memory_mb=512)
    manager = KernelManager(kernel_name=name)
    with pytest.raises(SpecError, match=r"unknown key 'memory_mb'\. Did you mean 'memory_mib'\?"):
        manager.start_kernel()
    manager.cleanup_resources()
