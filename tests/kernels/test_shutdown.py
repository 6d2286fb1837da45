"""A kernel that is shut down is gone, whatever its code does against that."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.errors import SandboxTimeout
from sandbox_kernel.jupyter import provisioner
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.tunnel.control_client import ControlClient
from tests.helpers.coroutines import finish

from .conftest import KernelStarter
from .live import jail_processes

AT_WAR = """
import os, signal, subprocess, sys
stop = '''
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid not in (1, os.getpid(), os.getppid()):
            try: os.kill(pid, signal.SIGSTOP)
            except OSError: pass
'''
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", stop], start_new_session=True)
print("begun")
while True:
    try:
        while True: pass
    except KeyboardInterrupt:
        pass
"""
"""A cell that stops every other process of its sandbox, the agent among them, again and again, and
obeys nobody itself."""

MOST_WAITED = 10.0
"""Seconds that the host waits for answers, all told, before it ends a kernel from outside."""


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each call to an agent was waited for that got no answer."""
    found: list[float] = []
    call = ControlClient.call

    async def recorded(client: ControlClient, name: str, **options: Any) -> Any:
        try:
            return await call(client, name, **options)
        except SandboxTimeout:
            found.append(options["timeout"])
            raise

    monkeypatch.setattr(ControlClient, "call", recorded)
    return found


@pytest.mark.parametrize("now", [False, True])
def test_who_stops_its_agent_is_ended_from_outside(
    start_kernel: KernelStarter, folder: Path, waited: list[float], now: bool
) -> None:
    """A cell sends SIGSTOP to the agent, through which the host would end the kernel, and goes on.
    `shutdown_kernel` neither raises nor waits long for an answer that does not come; no process of
    the sandbox is left."""
    live = start_kernel()
    live.begin(AT_WAR)
    live.manager.shutdown_kernel(now=now)
    assert sum(waited) <= MOST_WAITED
    assert jail_processes(folder) == []


def test_a_sandbox_that_does_nothing_at_all_is_ended(
    start_kernel: KernelStarter, folder: Path, waited: list[float]
) -> None:
    """Every process of the sandbox is stopped, also its first, so nothing in it answers or can be
    asked to do anything. Its shutdown does not wait long, and leaves nothing."""
    live = start_kernel()
    for pid in _pids(folder):
        os.kill(pid, signal.SIGSTOP)
    live.manager.shutdown_kernel()
    assert 0 < sum(waited) <= MOST_WAITED
    assert jail_processes(folder) == []


@pytest.mark.parametrize("now", [False, True])
def test_a_kernel_that_ends_is_not_looked_at_twice(
    start_kernel: KernelStarter, monkeypatch: pytest.MonkeyPatch, now: bool
) -> None:
    """Jupyter's manager looks every 0.1 s whether a kernel that it ends has ended. The first look
    waits until it has, so nobody sleeps longer than that takes."""
    monkeypatch.setattr(provisioner, "EXIT_WAIT", 60.0)
    live = start_kernel()
    looks = []
    poll = live.provisioner.poll

    async def look() -> int | None:
        before, found = live.kernel.exit_code, await poll()
        looks.append((before, found))
        return found

    monkeypatch.setattr(live.provisioner, "poll", look)
    assert live.manager.is_alive()  # nobody has asked for its end, so nobody waits
    live.manager.shutdown_kernel(now=now, restart=True)
    assert looks[0] == (None, None)
    assert all(found is not None for _, found in looks[1:])


def test_a_record_that_cannot_be_read_does_not_keep_a_sandbox(
    start_kernel: KernelStarter, folder: Path
) -> None:
    """Somebody has spoilt the sandbox's record, and nothing can be written beside it. The shutdown
    says that the sandbox cannot be removed; its processes end with it."""
    live = start_kernel()
    sandbox = live.sandbox
    [record] = (folder / "data" / "records" / "local").iterdir()
    good = record.read_text()
    record.write_text("spoilt")
    (folder / "data" / "sandboxes" / sandbox / "ended").mkdir()
    live.manager.shutdown_kernel(now=True)
    assert jail_processes(folder) == []
    record.write_text(good)
    asyncio.run(LocalClient().remove(sandbox))


def test_a_kernel_that_is_ended_by_force_leaves_its_files(start_kernel: KernelStarter) -> None:
    """What a kernel's agent cannot end is ended by the sandbox's first process: the kernel with
    all that it has started, and nothing else. A restart finds the files."""
    live = start_kernel()
    live.ok("open('kept.txt', 'w').write('kept')")
    live.ok("import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    finish(live.kernel.end_by_force())
    assert live.kernel.exit_code == -signal.SIGKILL
    sandbox = live.sandbox
    live.manager.restart_kernel(now=True)
    live.reconnect()
    assert live.sandbox == sandbox
    assert live.ok("open('kept.txt').read()").value == "'kept'"
    processes = "[open(f'/proc/{n}/cmdline').read() for n in os.listdir('/proc') if n.isdigit()]"
    assert "sleep" not in live.ok(f"import os; str({processes})").value


def _pids(folder: Path) -> list[int]:
    """The jail's processes, without bubblewrap's, which is outside of it."""
    found = [line.partition(": ") for line in jail_processes(folder)]
    return [int(pid) for pid, _, command in found if "bwrap" not in command.split(" ")[0]]


def test_a_stopped_workspace_helper_does_not_hold_the_shutdown_up(
    start_kernel: KernelStarter, folder: Path
) -> None:
    """A cell stops the process that reads the files for a save. It is continued: the last save
    has what the cell wrote."""
    live = start_kernel(workspace="stopped")
    asyncio.run(live.provisioner.save())
    live.ok("open('kept.txt', 'w').write('kept')")
    live.begin(AT_WAR.replace("while True:\n    for pid", "for _ in range(1):\n    for pid"))
    live.manager.shutdown_kernel()
    assert jail_processes(folder) == []
    again = start_kernel(workspace="stopped")
    assert again.ok("open('kept.txt').read()").value == "'kept'"
