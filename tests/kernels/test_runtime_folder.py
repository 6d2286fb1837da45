"""The folder of the sockets disappears while the kernel goes on: at logout, or by a cleaner."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from jupyter_client import BlockingKernelClient

from sandbox_kernel.jupyter.connections import addresses
from sandbox_kernel.paths import runtime_dir
from sandbox_kernel.tunnel import tunnel
from sandbox_kernel.tunnel.background import submit
from tests.helpers.waiting import wait_until

from .conftest import StartKernel
from .live import PATIENCE, Live, run_cell


def printed_in_a_new_tab(live: Live, code: str) -> str:
    """What a cell prints for a client that connects now."""
    client = BlockingKernelClient()  # the manager's own would all be one to the kernel
    client.load_connection_info(live.manager.get_connection_info())
    client.start_channels()
    try:
        client.wait_for_ready(timeout=20)
        return run_cell(client, code).text()
    finally:
        client.stop_channels()


def test_a_logout_does_not_take_the_kernel_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start_kernel: StartKernel
) -> None:
    """A server goes on in tmux when its user logs out, and $XDG_RUNTIME_DIR is deleted with all
    that is in it. A new tab, a command, a broken link and a restart find the kernel as before."""
    session = folder / "user"
    session.mkdir(0o700)
    monkeypatch.delenv("SANDBOX_KERNEL_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    live = start_kernel()
    live.ok("x = 'kept'")
    shutil.rmtree(session)
    assert printed_in_a_new_tab(live, "print(x)") == "kept\n"
    handle = live.kernel.handle
    said = submit(asyncio.wait_for(handle.shell("echo here", timeout=30), 60)).result(90)
    assert said.stdout == "here\n"
    assert submit(handle.info()).result(30).status == "running"
    live.cut()
    wait_until(lambda: live.kernel.tunnel.reconnects, "a new link")
    assert live.ok("print(x)").text() == "kept\n"
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=PATIENCE)
    assert printed_in_a_new_tab(live, "print('x' in dir())") == "False\n"


def test_somebody_else_has_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary directory that all users share anybody can: that keeps nobody from work."""
    monkeypatch.delenv("SANDBOX_KERNEL_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    usual = folder / f"sandbox-kernel-{os.getuid()}"
    assert runtime_dir() == usual
    usual.rmdir()
    usual.touch()
    assert runtime_dir() == folder / "sandbox-kernel"


def test_sockets_that_were_deleted_are_made_again(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody empties the folder of temporary files. Clients that are connected notice nothing,
    and others can connect again a few seconds later."""
    monkeypatch.setattr(tunnel, "ALIVE_INTERVAL", 0.1)
    live.ok("x = 'kept'")
    paths = [Path(str(path)) for path in addresses(live.provisioner.connection_info).values()]
    shutil.rmtree(paths[0].parent)
    wait_until(lambda: all(path.is_socket() for path in paths), "the sockets are back")
    assert os.stat(paths[0].parent).st_mode & 0o777 == 0o700
    assert printed_in_a_new_tab(live, "print(x)") == "kept\n"
    assert live.ok("print(x)").text() == "kept\n"
