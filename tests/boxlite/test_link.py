"""Process 1 of a box and the link to it, without a VM: in a PID namespace of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox_kernel import guest_program
from sandbox_kernel.errors import ExecFailed, SandboxError, SandboxGone
from sandbox_kernel.guest.commands.box import EXIT_CODES
from sandbox_kernel.guest.commands.box_connector import ADDRESS
from sandbox_kernel.sandboxes.boxlite.link import BoxLink
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.controlled_stream import ControlledStream
from sandbox_kernel.sandboxes.exec_stream import ExecStream, run_to_end
from sandbox_kernel.wire.codec import PREAMBLE, Base64Codec
from sandbox_kernel.wire.frames import DATA, RESET, Frame, encode
from sandbox_kernel.wire.mux import INITIAL_WINDOW
from tests.helpers.waiting import until

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("nsenter") or not shutil.which("unshare"),
    reason="needs root, unshare and nsenter to enter a PID namespace",
)
LIMIT = 60.0


class Carrier:
    """A connector that was started in the namespace from outside, as BoxLite does it in a box."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def read(self) -> bytes:
        assert self.process.stdout is not None
        return await self.process.stdout.read(1024)

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


class Box:
    """A process 1 that runs, and links to it."""

    def __init__(self, process: asyncio.subprocess.Process, init: int) -> None:
        self.process = process
        self.init = init
        self.links: list[BoxLink] = []

    async def carrier(self) -> Carrier:
        return Carrier(
            await asyncio.create_subprocess_exec(
                *("nsenter", "-t", str(self.init), "-p", "-m", "-n"),
                *_program("box_connector"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def link(self, lease: float = 1000.0) -> BoxLink:
        async def why() -> SandboxError:
            return SandboxGone("the box has ended")

        link = BoxLink(await self.carrier(), "test", why)
        self.links.append(link)
        await link.configure(lease, {"FROM_SPEC": "all"}, "/tmp", timeout=LIMIT)
        return link


@contextlib.asynccontextmanager
async def box() -> AsyncIterator[Box]:
    """A process 1 in new namespaces."""
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"),
        *_program("box"),
    )
    try:
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        (init,) = await until(lambda: _words(children))
        made = Box(process, int(init))
        yield made
        for link in made.links:
            await link.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _program(module: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", guest_program.program(f"guest.commands.{module}")]


def _words(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()


def command(*argv: str, **more: Any) -> Command:
    return Command(argv, **more)


async def logs(link: BoxLink) -> str:
    return str((await link.request("logs"))["log"])


async def output(stream: ExecStream) -> bytes:
    found = b""
    while piece := await stream.read():
        found += piece
    return found


async def test_commands() -> None:
    """Streams are byte-exact and kept apart; exit codes and signals are as they were."""
    async with box() as found:
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
            done = await run_to_end(stream, b"", 1000)
            assert (done.stdout, done.stderr, done.exit_code) == ("all\n", "err\n", -9)
        with pytest.raises(ExecFailed, match="no-such-command"):
            await link.open(command("no-such-command"))
        with pytest.raises(ExecFailed, match="/no/such"):
            await link.open(command("true", cwd="/no/such"))


async def test_a_flood_waits_in_the_box() -> None:
    """Nobody reads: no more than a window comes, and the command waits."""
    async with box() as found:
        link = await found.link()
        async with await link.open(command("head", "-c", "100000000", "/dev/zero")) as stream:
            ended, _ = await asyncio.wait({asyncio.ensure_future(stream.wait())}, timeout=0.5)
            assert not ended
            assert len(await stream.read()) == INITIAL_WINDOW
        async with await link.open(command("sleep", "1000")) as stream:
            writing = asyncio.ensure_future(stream.write(b"x" * 10_000_000))
            done, _ = await asyncio.wait({writing}, timeout=0.3)
            assert not done
        with pytest.raises(BrokenPipeError):
            await writing


async def test_commands_that_come_and_go() -> None:
    """One is closed in the middle of its output, and another opened in the same breath: what the
    first has left behind, its descriptors among it, is not taken for the second's."""
    async with box() as found:
        link = await found.link()
        for number in range(40):
            stream = await link.open(command("yes", str(number)))
            assert set((await stream.read()).split()[:-1]) <= {b"%d" % number}
            closing = asyncio.ensure_future(stream.close())
            await asyncio.sleep(0)
            async with await link.open(command("echo", "next")) as following:
                assert await output(following) == b"next\n"
            await closing
        assert await logs(link) == ""


async def test_a_terminal() -> None:
    """With its size, new sizes, and keys that are signals."""
    async with box() as found:
        link = await found.link()
        script = "trap 'stty size' WINCH; stty size; while true; do sleep 0.05; done"
        async with await link.open(command("/bin/sh", "-c", script, tty=(31, 97))) as stream:
            assert b"31 97" in await stream.read()
            await stream.resize(40, 120)
            assert b"40 120" in await stream.read()
            await stream.write(b"\x03")
            assert await stream.wait() == -signal.SIGINT


async def test_a_link_that_breaks_ends_its_commands() -> None:
    """And only its own: another link's go on, as do spawned ones."""
    async with box() as found:
        first, second = await found.link(), await found.link()
        await second.spawn(command("sleep", "31536007"))
        kept = await second.open(command("cat"))
        await first.open(command("sleep", "31536008"))
        await first.close()

        async def ended() -> bool:
            return not await _running(second, "31536008")

        await until(ended)
        assert await _running(second, "31536007")
        await kept.write(b"still here")
        assert await kept.read() == b"still here"


async def _running(link: BoxLink, word: str) -> bool:
    async with await link.open(command("pgrep", "-f", f"sleep {word}")) as stream:
        return bool(await output(stream))


async def test_the_end_of_a_box() -> None:
    """Commands may say goodbye; the exit code says why it ended."""
    async with box() as found:
        link = await found.link()
        script = "trap 'echo goodbye; exit' TERM; echo up; while true; do sleep 0.02; done"
        await link.spawn(command("/bin/sh", "-c", script))

        async def up() -> bool:
            return "up" in await logs(link)

        await until(up)
        assert "goodbye" in (await link.request("stop"))["log"]
        assert await found.process.wait() == EXIT_CODES["stop"]
        with pytest.raises(SandboxGone):
            await link.open(command("true"))


async def test_the_end_of_the_main_command() -> None:
    """Is the end of the box."""
    async with box() as found:
        link = await found.link()
        await link.spawn(command("true", main=True))
        assert await found.process.wait() == EXIT_CODES["main"]


async def test_the_lease() -> None:
    """Nobody has a command open during that time: the link alone does not count."""
    async with box() as found:
        link = await found.link(lease=0.5)
        async with await link.open(command("cat")):
            done, _ = await asyncio.wait({asyncio.ensure_future(found.process.wait())}, timeout=1.5)
            assert not done
        assert await found.process.wait() == EXIT_CODES["lease"]


async def test_code_in_the_box_cannot_be_the_host() -> None:
    """Only a command from outside of the box may talk to process 1."""
    async with box() as found:
        link = await found.link()
        code = (
            "import socket\n"
            f"sock = socket.socket(socket.AF_UNIX); sock.connect({ADDRESS!r})\n"
            "try:\n"
            "    socket.send_fds(sock, [b'{}'], [0, 1]); print(sock.recv(100))\n"
            "except ConnectionError:\n"
            "    print(b'')\n"
        )
        async with await link.open(command(sys.executable, "-c", code)) as stream:
            assert await output(stream) == b"b''\n"


STARTED = Frame(DATA, 1, 1, 0, b'{"pid": 7}\n')
"""The first request has stream 1; its command's stdin and stdout are stream 3."""


class Hostile:
    """A box that says that it has started the command it is asked for, and then lies."""

    def __init__(self, lie: bytes) -> None:
        self.asked, self.believed = asyncio.Event(), asyncio.Event()
        self._said = self._say(lie)

    async def _say(self, lie: bytes) -> AsyncIterator[bytes]:
        yield PREAMBLE
        await self.asked.wait()
        yield _line(STARTED)
        await self.believed.wait()
        yield lie
        await asyncio.Event().wait()

    async def read(self) -> bytes:
        return await anext(self._said)

    async def write(self, data: bytes) -> None:
        self.asked.set()

    async def close(self) -> None: ...


def _line(*frames: Frame) -> bytes:
    return b"".join(map(bytes, Base64Codec().encode([encode(frame) for frame in frames])))


async def lied_to(lie: bytes) -> tuple[BoxLink, ControlledStream]:
    """A link to a hostile box, and a command that seems to run in it."""

    async def why() -> SandboxError:
        return SandboxGone("the box has ended")

    box = Hostile(lie)
    link = BoxLink(box, "test", why)
    stream = await link.open(command("true"))
    box.believed.set()
    return link, stream


@pytest.mark.parametrize(
    "lie",
    [
        b"no base64\n",
        b"QUFB" * 90_000,
        _line(Frame(DATA, 3, 2, 0, b"")),
        _line(Frame(DATA, 3, 3, 0, b"a gap")),
        _line(Frame(DATA, 99, 2, 0, b"never opened")),
        _line(*(Frame(DATA, 3, number, 0, bytes(65536)) for number in range(2, 9))),
    ],
)
async def test_a_hostile_box(lie: bytes) -> None:
    """What it may not send ends the link; nothing else happens."""
    link, stream = await lied_to(lie)
    await asyncio.wait_for(link.closed.wait(), LIMIT)
    with pytest.raises(SandboxGone):
        await stream.wait()
    await link.close()


@pytest.mark.parametrize("answer", [b"no json\n", b"[1]\n", b"[" * 50_000 + b"\n"])
async def test_a_hostile_answer(answer: bytes) -> None:
    """Costs its own command only."""
    link, stream = await lied_to(_line(Frame(DATA, 1, 2, 0, answer), Frame(RESET, 3, 3, 0, b"")))
    assert await asyncio.wait_for(stream.read(), LIMIT) == b""
    with pytest.raises(SandboxError, match="sent an answer"):
        await stream.wait()
    assert not link.closed.is_set()
    await link.close()
