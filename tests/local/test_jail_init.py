"""Process 1 of the jail, seen by the host that speaks to it and by the hostile code around it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.guest.commands.process_one import MAX_REQUEST, exit_words
from sandbox_kernel.guest.jail import disk_usage, init, watchdog
from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.local.handle import LocalHandle
from sandbox_kernel.sandboxes.local.jail_request import SOCKET, open_request
from tests.helpers.waiting import until

from .sandboxes import client_that_leaves_nothing, sandbox


@pytest.fixture
def client(own_dirs: Path) -> Iterator[LocalClient]:
    with client_that_leaves_nothing(own_dirs) as client:
        yield client


async def python(handle: LocalHandle, code: str) -> str:
    result = await handle.exec("python3", ["-c", code], timeout=50)
    assert result.ok, result.output
    return result.stdout.strip()


# --- hostile code in the jail ---


async def test_cannot_be_looked_into(client: LocalClient) -> None:
    """Its memory, descriptors and environment are closed to code with the same uid."""
    async with sandbox(client) as handle:
        code = (
            "import os\n"
            "for what in (lambda: open('/proc/1/mem', 'rb+'), lambda: os.readlink('/proc/1/fd/3'),"
            " lambda: open('/proc/1/environ').read(), lambda: open('/proc/1/maps').read()):\n"
            "    try: what()\n"
            "    except PermissionError: continue\n"
            "    print('open', what)\n"
            "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
            "print(libc.ptrace(16, 1, 0, 0))\n"
        )
        assert await python(handle, code) == "-1"


async def test_cannot_be_signalled_to_death(client: LocalClient) -> None:
    """No signal from inside ends or stops it."""
    async with sandbox(client) as handle:
        code = (
            "import os\n"
            "for number in range(1, 65):\n"
            "    try: os.kill(1, number)\n"
            "    except OSError: pass\n"
        )
        await python(handle, code)
        assert (await handle.info()).status == "running"
        await handle.shell("kill -9 -1")
        assert (await handle.exec("true")).ok


async def test_its_socket_is_not_in_the_jail(client: LocalClient) -> None:
    """Code in the jail can neither reach the socket nor put another in its place."""
    async with sandbox(client) as handle:
        script = f"find /run /tmp /dev /home /workspace /opt -name {SOCKET}; cat /proc/net/unix"
        assert SOCKET not in (await handle.shell(script)).stdout
        fds = await handle.shell("ls /proc/self/fd")
        assert fds.stdout.split() == ["0", "1", "2", "3"]  # 3 is the listing's own


async def test_spawned_commands_get_no_descriptors_either(client: LocalClient) -> None:
    """What is spawned has the log's pipe and nothing else of jailinit's."""
    async with sandbox(client) as handle:
        await handle.spawn(["sh", "-c", "ls -l /proc/self/fd > fds; mv fds done"])
        await until(lambda: file_there(handle, "done"))
        listing = (await handle.shell("cat done")).stdout
        links = sorted(line.split()[-3] for line in listing.splitlines() if "->" in line)
        assert links == ["0", "1", "2", "3"]


async def file_there(handle: LocalHandle, name: str) -> bool:
    return (await handle.exec("test", ["-e", name])).ok


async def test_orphans_are_reaped(client: LocalClient) -> None:
    """Processes whose parent has gone do not stay as zombies."""
    async with sandbox(client) as handle:
        await handle.shell("for i in 1 2 3 4 5; do (setsid sleep 0.1 &); done")
        script = "grep -l '^State:.Z' /proc/[0-9]*/status; pgrep -c sleep || true"
        await until(lambda: nothing_said(handle, script))


async def nothing_said(handle: LocalHandle, script: str) -> bool:
    return (await handle.shell(script)).stdout.strip() in ("", "0")


async def test_children_are_killed_first_when_memory_is_short(client: LocalClient) -> None:
    """The kernel's out-of-memory killer prefers every command to jailinit."""
    async with sandbox(client) as handle:
        own = int((await handle.shell("cat /proc/self/oom_score_adj")).stdout)
        # It wears its children's score for the moment in which it starts them.
        script = f"while [ $(cat /proc/1/oom_score_adj) -ge {own} ]; do sleep 0.01; done"
        assert own >= init.OOM_SCORE_RAISE
        assert own == 1000 or (await handle.exec("sh", ["-c", script], timeout=30)).ok


# --- the host ---


async def test_nonsense_is_answered(client: LocalClient) -> None:
    """A request that makes no sense gets an error and harms nobody."""
    async with sandbox(client) as handle:
        runtime = handle._folders.runtime
        nonsense: list[dict[str, object]] = [
            {"kind": "dance"},
            {},
            {"kind": "exec", "argv": ["true"], "cwd": "/"},
            {"kind": "exec", "argv": [], "cwd": "/"},
            {"kind": "spawn", "argv": ["true"], "cwd": []},
            {"kind": "spawn", "argv": ["tr\0ue"], "cwd": "/"},
        ]
        for message in nonsense:
            control, answer = await open_request(runtime, message, timeout=10)
            control.close()
            assert answer["error"] == "EINVAL", message
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(runtime / SOCKET))
            raw.sendall(b"not json\n")
            raw.settimeout(10)
            assert json.loads(raw.recv(1000))["error"] == "EINVAL"
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(runtime / SOCKET))
            raw.settimeout(10)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                raw.sendall(b"x" * 4 * MAX_REQUEST)
        assert (await handle.exec("true")).ok


async def test_requests_in_pieces(client: LocalClient) -> None:
    """A request may arrive a byte at a time."""
    async with sandbox(client) as handle:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.setblocking(False)
            raw.connect(str(handle._folders.runtime / SOCKET))
            loop = asyncio.get_running_loop()
            for byte in b'{"kind": "info"}\n':
                await loop.sock_sendall(raw, bytes([byte]))
            assert json.loads(await loop.sock_recv(raw, 65536))["processes"] == 0


async def test_watching_does_not_keep_a_jail(client: LocalClient) -> None:
    """Asking for its state is not being attached."""
    async with sandbox(client, lease_seconds=0.3) as handle:
        await until(lambda: has_ended(handle))


async def has_ended(handle: LocalHandle) -> bool:
    return (await handle.info()).status == "stopped"


# --- its parts ---


def test_process_line() -> None:
    """The name of a process may hold anything, also what looks like the rest of the line."""
    text = "42 (evil) S 9 (x)) R " + " ".join(str(n) for n in range(4, 53))
    process = watchdog.Process(text)
    assert process.pid == 42
    assert process.name == "evil) S 9 (x)"
    assert process.state == "R"
    assert process.threads == 20
    assert process.rss == 24 * watchdog.PAGE


def test_processes_of_this_host_can_be_read() -> None:
    """The same code reads any /proc."""
    assert os.getpid() in {process.pid for process in watchdog.processes()}


def test_folders_are_measured(tmp_path: Path) -> None:
    """Hard links count once, links are not followed, and small files count as something."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "big").write_bytes(bytes(2**20))
    os.link(tmp_path / "a" / "big", tmp_path / "again")
    os.symlink("/", tmp_path / "root")
    for number in range(disk_usage.WALK_SLICE):
        (tmp_path / f"{number}").touch()
    folders = disk_usage.MeasuredFolders([str(tmp_path)], 2**30, pids=list)
    later = time.monotonic() + disk_usage.WALK_EVERY + 1
    rounds = 1
    while not folders.measure(later):
        rounds += 1
    assert rounds == 2
    least = 2**20 + disk_usage.WALK_SLICE * disk_usage.ENTRY_BYTES
    assert least <= folders.used < least + 2**18


def test_exit_codes_in_words() -> None:
    """As they appear in the log."""
    assert exit_words(3) == "exit code 3"
    assert exit_words(-9) == "SIGKILL"
    assert exit_words(-63) == "signal 63"
