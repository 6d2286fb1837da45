"""The broker, with the local jail behind it: what it does is the same for every backend."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.errors import (
    ExecFailed,
    SandboxExists,
    SandboxGone,
    SandboxNotFound,
    SandboxUnavailable,
)
from sandbox_kernel.sandboxes.broker import protocol
from sandbox_kernel.sandboxes.broker.main import EXIT_TAKEN
from sandbox_kernel.sandboxes.broker.startup import Place
from sandbox_kernel.sandboxes.local import bubblewrap
from sandbox_kernel.spec import SandboxSpec
from tests.helpers.waiting import until

from .brokered_jails import FACTORY, JailClient, broker_pid

pytestmark = pytest.mark.skipif(bubblewrap.why_not() is not None, reason="no jail can be made here")

LIMIT = 60.0


@pytest.fixture
def client() -> Iterator[JailClient]:
    """Whatever sandboxes a test leaves are removed."""
    client = JailClient()
    yield client

    async def remove_all() -> None:
        for name in await client.list():
            await client.remove(name)

    asyncio.run(remove_all())


def ended(pid: int) -> bool:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        import select

        return bool(select.select([fd], [], [], LIMIT)[0])
    finally:
        os.close(fd)


async def test_commands_go_through_it(client: JailClient) -> None:
    """Output, exit code, input, terminals and sockets are as without a broker."""
    handle = await client.create(SandboxSpec(name="one", env={"A": "b"}))
    result = await handle.exec("/bin/sh", ["-c", "cat; echo $A >&2; exit 4"], stdin=b"in")
    assert (result.stdout, result.stderr, result.exit_code) == ("in", "b\n", 4)
    data = os.urandom(3_000_000)
    async with await handle.open_stream(["cat"], duplex=True) as stream:
        assert stream.socket is not None

        async def feed() -> None:
            await stream.write(data)
            await stream.close_stdin()

        writing = asyncio.ensure_future(feed())
        back = b""
        while piece := await stream.read():
            back += piece
        await writing
        assert back == data
        assert await stream.wait() == 0
    async with await handle.open_stream(["stty", "size"], tty=(30, 90)) as stream:
        assert await stream.read() == b"30 90\r\n"
    async with await handle.open_stream(["sleep", "1000"]) as stream:
        await stream.send_signal(signal.SIGTERM)
        assert await stream.wait() == -signal.SIGTERM
    await handle.spawn(["echo", "spawned"])

    async def logged() -> bool:
        return "spawned" in await handle.logs()

    await until(logged)
    assert (await handle.info()).status == "running"


async def test_errors_keep_their_kind(client: JailClient) -> None:
    """What is raised in the broker is raised here."""
    handle = await client.create(SandboxSpec(name="one"))
    with pytest.raises(SandboxExists, match="one"):
        await client.create(SandboxSpec(name="one"))
    with pytest.raises(ExecFailed, match="no-such-command"):
        await handle.exec("no-such-command")
    with pytest.raises(SandboxNotFound):
        await client.get("two")
    await handle.stop()
    with pytest.raises(SandboxGone, match="stopped"):
        await handle.exec("true")
    await client.remove("one")
    with pytest.raises(SandboxGone, match="removed"):
        await handle.exec("true")
    # Another one that has the name now is not it.
    await client.create(SandboxSpec(name="one"))
    with pytest.raises(SandboxGone):
        await handle.exec("true")


_USE = """
import asyncio, sys
from tests.boxlite.brokered_jails import JailClient, broker_pid
from sandbox_kernel.spec import SandboxSpec
async def main(name):
    client = JailClient()
    handle = await client.create(SandboxSpec(name=name))
    print((await handle.exec("echo", [name])).stdout.strip(), broker_pid())
    await client.remove(name)
asyncio.run(main(sys.argv[1]))
"""


def test_processes_that_start_at_once_share_one(own_dirs: Path) -> None:
    """Whoever comes first starts it, the others find it."""
    root = Path(__file__).parents[2]
    users = [
        subprocess.Popen(
            [sys.executable, "-c", _USE, f"user-{n}"], stdout=subprocess.PIPE, text=True, cwd=root
        )
        for n in range(4)
    ]
    said = [user.communicate(timeout=LIMIT)[0].split() for user in users]
    assert [name for name, _ in said] == [f"user-{n}" for n in range(4)]
    assert len({pid for _, pid in said}) == 1


async def test_sandboxes_outlive_it(client: JailClient) -> None:
    """It is killed: a stream breaks, the sandbox goes on, and the next request has a new one."""
    handle = await client.create(SandboxSpec(name="one"))
    await handle.shell("echo kept > note")
    async with await handle.open_stream(["cat"]) as stream:
        first = broker_pid()
        os.kill(first, signal.SIGKILL)
        assert await stream.read() == b""
        with pytest.raises(SandboxGone, match="broker"):
            await stream.wait()
    assert (await handle.shell("cat note")).stdout == "kept\n"
    assert broker_pid() != first


async def test_one_that_dies_before_it_has_read_a_request(client: JailClient) -> None:
    """It was killed, but its door is still there: who knocks is served by the next one."""
    handle = await client.create(SandboxSpec(name="one"))
    first = broker_pid()
    os.kill(first, signal.SIGSTOP)
    asking = asyncio.ensure_future(handle.shell("echo here"))
    answered, _ = await asyncio.wait({asking}, timeout=0.2)
    assert not answered
    os.kill(first, signal.SIGKILL)
    assert (await asking).stdout == "here\n"
    assert broker_pid() != first


async def test_only_one_for_a_socket(client: JailClient, own_dirs: Path) -> None:
    """A second one that is started by hand ends at once."""
    await client.create(SandboxSpec(name="one"))
    command = [sys.executable, "-m", "sandbox_kernel.sandboxes.broker.main"]
    second = subprocess.run(
        [*command, FACTORY, str(client.place().socket)], timeout=LIMIT, check=False
    )
    assert second.returncode == EXIT_TAKEN


def start_by_hand(idle: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A broker with an idle time of its own, which listens."""
    path = Place("local", FACTORY).socket
    command = [sys.executable, "-m", "sandbox_kernel.sandboxes.broker.main"]
    broker = subprocess.Popen([*command, FACTORY, str(path), idle], stdout=subprocess.PIPE)
    assert broker.stdout is not None
    with broker.stdout:
        assert broker.stdout.read(1) == b"\n"
    return broker, path


def test_it_ends_when_nobody_needs_it() -> None:
    """Nobody has been connected for its idle time: it ends and takes its socket along."""
    broker, path = start_by_hand("0.3")
    assert broker.wait(LIMIT) == 0
    assert not path.exists()


async def test_a_stream_keeps_it(client: JailClient) -> None:
    """Whoever is connected counts, also if nothing is said."""
    broker, _ = start_by_hand("2")
    handle = await client.create(SandboxSpec(name="one"))
    async with await handle.open_stream(["cat"]) as stream:
        await asyncio.sleep(3.0)  # longer than its idle time, which is what is tested
        assert broker.poll() is None
        await stream.write(b"here\n")
        assert await stream.read() == b"here\n"
    await asyncio.to_thread(broker.wait, LIMIT)


def test_it_ends_when_nobody_can_find_it() -> None:
    """Its socket is deleted."""
    broker, path = start_by_hand("1000")
    path.unlink()
    assert broker.wait(LIMIT) == 0


def talk(path: Path, message: dict[str, Any]) -> dict[str, Any]:
    """One message to the broker, and its answer; empty if it hangs up."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT)
        sock.connect(str(path))
        sock.sendall(json.dumps(message).encode() + b"\n")
        line = sock.makefile().readline()
        return json.loads(line) if line else {}


def test_an_older_one_makes_room_for_a_newer_client() -> None:
    """It ends as soon as it has nothing to do."""
    broker, path = start_by_hand("1000")
    answer = talk(path, {"protocol": protocol.PROTOCOL + 1, "kind": "list"})
    assert answer == {"protocol": protocol.PROTOCOL, "retiring": True}
    assert broker.wait(LIMIT) == 0


async def test_an_older_client_is_told_to_restart(
    client: JailClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer broker stays, and the client's error says what to do."""
    handle = await client.create(SandboxSpec(name="one"))
    with monkeypatch.context() as patch:
        patch.setattr("sandbox_kernel.sandboxes.broker.startup.PROTOCOL", 0)
        with pytest.raises(SandboxUnavailable, match="Restart the programs"):
            await handle.exec("true")
    assert (await handle.exec("true")).ok


@pytest.mark.parametrize("nonsense", ["{}", "[]", "no json", '{"protocol": 1, "kind": "none"}'])
async def test_nonsense_does_no_harm(client: JailClient, nonsense: str) -> None:
    """It hangs up on who does not speak its language, and serves the others."""
    handle = await client.create(SandboxSpec(name="one"))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT)
        sock.connect(str(client.place().socket))
        sock.sendall(nonsense.encode() + b"\n")
        await asyncio.to_thread(sock.makefile().read)
    assert (await handle.exec("true")).ok


async def test_who_hangs_up_while_creating_gets_nothing(client: JailClient) -> None:
    """The creation is undone: no sandbox that nobody knows of."""
    await client.create(SandboxSpec(name="first"))
    creating = asyncio.ensure_future(client.create(SandboxSpec(name="second")))

    async def both() -> bool:
        return await client.list() == ["first", "second"]

    await until(both)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating

    async def undone() -> bool:
        return await client.list() == ["first"]

    await until(undone)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be somebody else")
def test_other_users_are_not_served(own_dirs: Path) -> None:
    """Even if they get at the socket."""
    broker, path = start_by_hand("1000")
    for folder in (own_dirs, path.parent):
        folder.chmod(0o755)
    path.chmod(0o777)
    code = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "sock = socket.socket(socket.AF_UNIX); sock.settimeout(30); sock.connect(sys.argv[1])\n"
        "try:\n"
        '    sock.sendall(b\'{"protocol": 1, "kind": "list"}\\n\')\n'
        "    print(repr(sock.recv(1000)))\n"
        "except ConnectionError:\n"
        "    print(b'')\n"
    )
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=LIMIT
        )
        assert ran.stdout.strip() == "b''", ran.stderr
        assert talk(path, {"protocol": protocol.PROTOCOL, "kind": "list"}) == {"result": []}
    finally:
        path.unlink()
        broker.wait(LIMIT)
