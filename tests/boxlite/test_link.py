"""The supervisor and the link to it, without a VM: in a PID namespace of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from sandbox_kernel.errors import ExecFailed, SandboxError, SandboxGone
from sandbox_kernel.sandboxes.base import _run
from sandbox_kernel.sandboxes.boxlite import relay, supervisor
from sandbox_kernel.sandboxes.boxlite.link import BoxLink, BoxStream

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("nsenter") or not shutil.which("unshare"),
    reason="needs root, unshare and nsenter to enter a PID namespace",
)
LIMIT = 60.0


class Carrier:
    """A relay that was started in the namespace from outside, as BoxLite does it in a box."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def read(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.read(1024)).decode()

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


class Box:
    """A supervisor that runs, and links to it."""

    def __init__(self, process: asyncio.subprocess.Process, init: int) -> None:
        self.process = process
        self.init = init
        self.links: list[BoxLink] = []

    async def carrier(self) -> Carrier:
        return Carrier(
            await asyncio.create_subprocess_exec(
                *("nsenter", "-t", str(self.init), "-p", "-m", "-n"),
                *(sys.executable, "-I", "-S", str(relay.__file__)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def link(self, lease: float = 1000.0) -> BoxLink:
        async def why() -> SandboxError:
            return SandboxGone("the box has ended")

        link = BoxLink(await self.carrier(), "test", why)
        self.links.append(link)
        await link.opened(LIMIT)
        link.configure(lease, {"FROM_SPEC": "all"}, "/tmp")
        return link


@contextlib.asynccontextmanager
async def box() -> AsyncIterator[Box]:
    """A supervisor as process 1 of new namespaces."""
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-I", "-S", str(supervisor.__file__)),
    )
    try:
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        while not (found := _words(children)):
            await asyncio.sleep(0.01)
        yield Box(process, int(found[0]))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _words(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()


def run(test: Callable[[Box], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with box() as found:
            try:
                await asyncio.wait_for(test(found), LIMIT)
            finally:
                for link in found.links:
                    await link.close()

    asyncio.run(main())


def command(*argv: str, **more: Any) -> dict[str, Any]:
    return {"argv": list(argv), "env": {}, "cwd": None, "tty": None, "duplex": False, **more}


async def output(stream: BoxStream) -> bytes:
    found = b""
    while piece := await stream.read():
        found += piece
    return found


def test_commands() -> None:
    """Streams are byte-exact and kept apart; exit codes and signals are as they were."""

    async def test(found: Box) -> None:
        link = await found.link()
        data = os.urandom(2_000_000)
        async with await link.open(command("cat")) as stream:
            result = asyncio.ensure_future(output(stream))
            await stream.write(data)
            await stream.close_stdin()
            assert await result == data
            assert await stream.wait() == 0
        script = "echo $FROM_SPEC; echo err >&2; kill -9 $$"
        async with await link.open(command("/bin/sh", "-c", script)) as stream:
            done = await _run(stream, b"", 1000)
            assert (done.stdout, done.stderr, done.exit_code) == ("all\n", "err\n", -9)
        with pytest.raises(ExecFailed, match="no-such-command"):
            await link.open(command("no-such-command"))
        with pytest.raises(ExecFailed, match="/no/such"):
            await link.open(command("true", cwd="/no/such"))

    run(test)


def test_a_flood_waits_in_the_box() -> None:
    """Nobody reads: no more than a window comes, and the command waits."""

    async def test(found: Box) -> None:
        link = await found.link()
        async with await link.open(command("head", "-c", "100000000", "/dev/zero")) as stream:
            while len(stream._kept["out"]) < supervisor.WINDOW:
                await asyncio.sleep(0.01)
            done, _ = await asyncio.wait({asyncio.ensure_future(stream.wait())}, timeout=0.3)
            assert not done
            assert len(stream._kept["out"]) == supervisor.WINDOW
        async with await link.open(command("sleep", "1000")) as stream:
            writing = asyncio.ensure_future(stream.write(b"x" * 10_000_000))
            done, _ = await asyncio.wait({writing}, timeout=0.3)
            assert not done
        with pytest.raises(BrokenPipeError):
            await writing

    run(test)


def test_commands_that_come_and_go() -> None:
    """One is closed in the middle of its output, and another opened in the same breath: what the
    first has left behind, its descriptors among it, is not taken for the second's."""

    async def test(found: Box) -> None:
        link = await found.link()
        for number in range(40):
            stream = await link.open(command("yes", str(number)))
            assert set((await stream.read()).split()[:-1]) <= {b"%d" % number}
            closing = asyncio.ensure_future(stream.close())
            await asyncio.sleep(0)
            async with await link.open(command("echo", "next")) as following:
                assert await output(following) == b"next\n"
            await closing
        assert await link.request("logs") == ""

    run(test)


def test_a_terminal() -> None:
    """With its size, new sizes, and keys that are signals."""

    async def test(found: Box) -> None:
        link = await found.link()
        script = "trap 'stty size' WINCH; stty size; while true; do sleep 0.05; done"
        async with await link.open(command("/bin/sh", "-c", script, tty=[31, 97])) as stream:
            assert b"31 97" in await stream.read()
            await stream.resize(40, 120)
            assert b"40 120" in await stream.read()
            await stream.write(b"\x03")
            assert await stream.wait() == -signal.SIGINT

    run(test)


def test_a_link_that_breaks_ends_its_commands() -> None:
    """And only its own: another link's go on, as do spawned ones."""

    async def test(found: Box) -> None:
        first, second = await found.link(), await found.link()
        await second.spawn({"argv": ["sleep", "31536007"], "env": {}, "cwd": None})
        kept = await second.open(command("cat"))
        await first.open(command("sleep", "31536008"))
        await first.close()
        while await _running(second, "31536008"):
            await asyncio.sleep(0.02)
        assert await _running(second, "31536007")
        await kept.write(b"still here")
        assert await kept.read() == b"still here"

    run(test)


async def _running(link: BoxLink, word: str) -> bool:
    async with await link.open(command("pgrep", "-f", f"sleep {word}")) as stream:
        return bool(await output(stream))


def test_the_end_of_a_box() -> None:
    """Commands may say goodbye; the exit code says why it ended."""

    async def test(found: Box) -> None:
        link = await found.link()
        script = "trap 'echo goodbye; exit' TERM; echo up; while true; do sleep 0.02; done"
        await link.spawn({"argv": ["/bin/sh", "-c", script], "env": {}, "cwd": None})
        while "up" not in await link.request("logs"):
            await asyncio.sleep(0.01)
        assert "goodbye" in await link.request("stop")
        assert await found.process.wait() == supervisor.EXIT_STOPPED
        with pytest.raises(SandboxGone):
            await link.open(command("true"))

    run(test)


def test_the_end_of_the_main_command() -> None:
    """Is the end of the box."""

    async def test(found: Box) -> None:
        link = await found.link()
        await link.spawn({"argv": ["true"], "env": {}, "cwd": None, "main": True})
        assert await found.process.wait() == supervisor.EXIT_MAIN

    run(test)


def test_the_lease() -> None:
    """Nobody has a command open for so long: the link alone does not count."""

    async def test(found: Box) -> None:
        link = await found.link(lease=0.5)
        async with await link.open(command("cat")):
            done, _ = await asyncio.wait({asyncio.ensure_future(found.process.wait())}, timeout=1.5)
            assert not done
        assert await found.process.wait() == supervisor.EXIT_LEASE

    run(test)


def test_code_in_the_box_cannot_be_the_host() -> None:
    """Only a command from outside of the box may talk to the supervisor."""

    async def test(found: Box) -> None:
        link = await found.link()
        code = (
            "import socket\n"
            f"sock = socket.socket(socket.AF_UNIX); sock.connect({supervisor.ADDRESS!r})\n"
            "try:\n"
            "    socket.send_fds(sock, [b'relay'], [0, 1]); print(sock.recv(100))\n"
            "except ConnectionError:\n"
            "    print(b'')\n"
        )
        async with await link.open(command(sys.executable, "-c", code)) as stream:
            assert await output(stream) == b"b''\n"

    run(test)


@pytest.mark.parametrize(
    "line",
    ["no json", "[1]", '[1, "out", "***"]', '[1, "out", "' + "QUFB" * 90_000 + '"]', "[" * 50_000],
)
def test_a_hostile_box(line: str) -> None:
    """What it may not send ends the link; nothing else happens."""

    class Hostile:
        def __init__(self) -> None:
            self.lines = ['[0, "hello", {"boot": "x"}]\n', '[1, "started", 7]\n', line + "\n"]

        async def read(self) -> str:
            await asyncio.sleep(0.05)
            return self.lines.pop(0) if self.lines else await asyncio.sleep(1000, "")

        async def write(self, data: bytes) -> None: ...

        async def close(self) -> None: ...

    async def main() -> None:
        async def why() -> SandboxError:
            return SandboxGone("the box has ended")

        link = BoxLink(Hostile(), "test", why)
        stream = await link.open(command("true"))
        await asyncio.wait_for(link.closed.wait(), LIMIT)
        with pytest.raises(SandboxGone):
            await stream.wait()

    asyncio.run(main())
