"""Commands whose streams stay open: what carries a kernel's traffic, and terminals."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import resource
import signal

import pytest

from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle
from tests.helpers.waiting import LIMIT, until

from .conftest import SCALE, Backend
from .processes import not_running

MIB = 2**20


async def read_all(stream: ExecStream) -> bytes:
    """stdout to its end."""
    pieces = []
    while piece := await stream.read():
        pieces.append(piece)
    return b"".join(pieces)


async def read_until(stream: ExecStream, wanted: bytes) -> bytes:
    """stdout up to and with ``wanted``."""
    found = b""
    while wanted not in found:
        piece = await stream.read()
        assert piece, f"stdout ended with {found[-200:]!r} before {wanted!r}"
        found += piece
    return found


async def test_megabytes_there_and_back(backend: Backend, sandbox: SandboxHandle) -> None:
    """Megabytes of all bytes come back as they went in; as base64 where streams carry text only."""
    data = random.Random(8).randbytes(8_000_000 // SCALE)
    if not backend.capabilities.byte_exact_streams:
        data = base64.encodebytes(data)
    async with await sandbox.open_stream(["cat"]) as stream:

        async def feed() -> None:
            for start in range(0, len(data), 100_000):
                await stream.write(data[start : start + 100_000])
            await stream.close_stdin()

        back, _ = await asyncio.gather(read_all(stream), feed())
        assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()
        assert await stream.wait() == 0


async def test_a_conversation(sandbox: SandboxHandle) -> None:
    """Small pieces are passed on at once, both ways: nothing waits for a buffer to fill."""
    async with await sandbox.open_stream(["cat"]) as stream:
        for number in range(50):
            line = b"line %d\n" % number
            await stream.write(line)
            assert await read_until(stream, line) == line


async def test_stdin_is_pushed_back(sandbox: SandboxHandle) -> None:
    """Writing to a command that does not read waits, and goes on when it does."""
    waits = "while [ ! -e go-on ]; do sleep 0.05; done; exec wc -c"
    async with await sandbox.open_stream(["/bin/sh", "-c", waits]) as stream:
        size = 64 * MIB // SCALE
        writing = asyncio.ensure_future(stream.write(b"x" * size))
        done, _ = await asyncio.wait({writing}, timeout=2)
        assert not done, "megabytes were taken although nobody reads them"
        await sandbox.exec("touch", ["go-on"], timeout=LIMIT)
        await writing
        await stream.close_stdin()
        assert int(await read_all(stream)) == size
    await sandbox.exec("rm", ["go-on"], timeout=LIMIT)


async def test_output_that_nobody_reads_does_not_pile_up(sandbox: SandboxHandle) -> None:
    """A flood waits in the sandbox, not in the host's memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flood = ["/bin/sh", "-c", "head -c 1000000000 /dev/zero; exit 3"]
    async with await sandbox.open_stream(flood) as stream:
        await stream.read()
        for _ in range(10):
            assert (await sandbox.exec("true", timeout=LIMIT)).ok
        waiting = asyncio.ensure_future(stream.wait())
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done, "a command that floods ran to its end although nobody read its output"
        waiting.cancel()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 128 * MIB


async def test_closing_ends_the_command(sandbox: SandboxHandle) -> None:
    """Also one that pays no heed to a hangup. Closing twice is no error."""
    word = "31536002"
    script = f"trap '' HUP TERM; echo up; while true; do sleep {word}; done"
    stream = await sandbox.open_stream(["/bin/sh", "-c", script])
    await read_until(stream, b"up\n")
    await stream.close()
    await stream.close()
    await until(lambda: not_running(sandbox, word))


async def test_reading_is_over_when_the_stream_is_closed(sandbox: SandboxHandle) -> None:
    """Whoever waits for output is told that there will be none."""
    stream = await sandbox.open_stream(["sleep", "1000"])
    reading = asyncio.ensure_future(stream.read())
    await asyncio.sleep(0)
    await stream.close()
    assert await asyncio.wait_for(reading, LIMIT) == b""


async def test_signals(sandbox: SandboxHandle) -> None:
    """A signal reaches the command; one for a command that has ended is no error."""
    script = "trap 'echo got it; exit 9' USR1; echo up; while true; do sleep 0.05; done"
    async with await sandbox.open_stream(["/bin/sh", "-c", script]) as stream:
        await read_until(stream, b"up\n")
        await stream.send_signal(signal.SIGUSR1)
        assert await read_all(stream) == b"got it\n"
        assert await stream.wait() == 9
        await stream.send_signal(signal.SIGUSR1)
        assert await stream.wait() == 9


async def test_stderr_is_a_stream_of_its_own(sandbox: SandboxHandle) -> None:
    """Both can be read at the same time, and end with the command."""
    script = "for i in 1 2 3; do echo o$i; echo e$i >&2; done"
    async with await sandbox.open_stream(["/bin/sh", "-c", script]) as stream:

        async def errors() -> bytes:
            found = b""
            while piece := await stream.read_stderr():
                found += piece
            return found

        assert tuple(await asyncio.gather(read_all(stream), errors())) == (
            b"o1\no2\no3\n",
            b"e1\ne2\ne3\n",
        )


async def test_several_streams_at_once(sandbox: SandboxHandle) -> None:
    """Open streams are independent: the last one answers while the others wait."""
    streams = [await sandbox.open_stream(["cat"]) for _ in range(12)]
    try:
        for number, stream in reversed(list(enumerate(streams))):
            await stream.write(b"%d\n" % number)
            assert await read_until(stream, b"\n") == b"%d\n" % number
    finally:
        await asyncio.gather(*(stream.close() for stream in streams))


async def test_terminal(backend: Backend, sandbox: SandboxHandle) -> None:
    """A command with a terminal knows its size, hears of a new one, and can be interrupted."""
    if not backend.row.terminals:
        pytest.skip("this backend has no terminals")
    script = "trap 'stty size' WINCH; trap 'echo interrupted; exit 4' INT; tty -s && stty size; "
    script += "while true; do sleep 0.05; done"
    async with await sandbox.open_stream(["/bin/sh", "-c", script], tty=(31, 97)) as stream:
        await read_until(stream, b"31 97")
        await stream.resize(40, 120)
        await read_until(stream, b"40 120")
        await stream.write(b"\x03")
        await read_until(stream, b"interrupted")
        assert await stream.wait() == 4
