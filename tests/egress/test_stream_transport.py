"""Streams of the wire as connections of asyncio: as a socket would be, and bounded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from sandbox_kernel.tunnel.stream_transport import READ_LIMIT, StreamTransport, connect
from sandbox_kernel.wire.frames import BLOCKED, Buffer
from sandbox_kernel.wire.mux import BULK, DEFAULT_WINDOW, HIGH_WATER, Stream
from tests.helpers.waiting import LIMIT, until
from tests.wire.loops import Pair

NOISE = random.Random(0).randbytes(12 * 2**20)


class FarEnd:
    """The sandbox's side of the stream. It takes nothing while ``takes`` is False."""

    def __init__(self, pair: Pair) -> None:
        self.got = bytearray()
        self.takes = True
        self.untaken = 0
        self.finished = False
        self.reset: str | None = None
        self.peer = pair.guest
        self.stream: Stream = pair.guest.mux.open("egress:proxy", BULK)
        self.stream.owner = self
        pair.guest.flush_soon()

    def send(self, data: bytes) -> None:
        self.stream.write(data)
        self.peer.flush_soon()

    def finish(self) -> None:
        self.stream.finish()
        self.peer.flush_soon()

    def take(self) -> None:
        self.takes = True
        self.stream.consumed(self.untaken)
        self.untaken = 0
        self.peer.flush_soon()

    def on_data(self, payload: Buffer) -> None:
        self.got += payload
        if self.takes:
            self.stream.consumed(len(payload))
        else:
            self.untaken += len(payload)

    def on_finished(self) -> None:
        self.finished = True

    def on_reset(self, reason: str) -> None:
        self.reset = reason

    def on_room(self) -> None: ...


class Joined:
    """Both ends of one stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    transport: StreamTransport

    def __init__(self) -> None:
        self.pair = Pair(SimpleNamespace(loop=asyncio.get_running_loop()))  # type: ignore[arg-type]
        self.closed: list[StreamTransport] = []
        self.opened = asyncio.Event()
        self.pair.host.on_opened = self._opened
        self.far = FarEnd(self.pair)

    def _opened(self, stream: Stream, target: str) -> None:
        connected = connect(self.pair.host, stream, self.closed.append)
        self.reader, self.writer, self.transport = connected
        self.opened.set()


def with_joined(test: Callable[[Joined], Awaitable[None]]) -> None:
    async def main() -> None:
        joined = Joined()
        try:
            async with asyncio.timeout(LIMIT):
                await joined.opened.wait()
                await test(joined)
        finally:
            joined.pair.close()

    asyncio.run(main())


async def settled(amount: Callable[[], int]) -> int:
    """The amount, when it has stopped growing."""
    before = -1
    while before != amount():
        before = amount()
        await asyncio.sleep(0.1)
    return before


def test_both_ways_and_each_to_its_end() -> None:
    async def test(joined: Joined) -> None:
        far = joined.far
        far.send(NOISE)
        far.finish()
        assert await joined.reader.read() == NOISE
        assert not joined.closed
        for start in range(0, len(NOISE), 100_000):  # the other direction goes on
            joined.writer.write(NOISE[start : start + 100_000])
            await joined.writer.drain()
        joined.writer.write_eof()
        await until(lambda: far.finished)
        assert far.got == NOISE
        assert joined.closed == [joined.transport]

    with_joined(test)


def test_a_sandbox_that_sends_what_nobody_reads_has_to_wait() -> None:
    """However often it says that it would like to send more."""

    async def test(joined: Joined) -> None:
        far = joined.far
        far.send(NOISE)
        for _ in range(50):
            joined.pair.guest.session.send(BLOCKED, far.stream.id)
        joined.pair.guest.flush_soon()
        left = await settled(lambda: far.stream.buffered)
        assert len(NOISE) - left <= 2 * READ_LIMIT + 2 * DEFAULT_WINDOW
        far.finish()
        assert await joined.reader.read() == NOISE

    with_joined(test)


def test_small_payloads_that_wait_take_little_memory() -> None:
    """A byte in a frame of its own costs as much as a byte among others."""

    async def test(joined: Joined) -> None:
        joined.transport.pause_reading()
        sent = NOISE[:50_000]
        for at in range(len(sent)):
            joined.transport.on_data(sent[at : at + 1])
        assert len(joined.transport._waiting) < 10
        joined.transport.resume_reading()
        assert await joined.reader.readexactly(len(sent)) == sent

    with_joined(test)


def test_a_sandbox_that_reads_nothing_stops_the_writer() -> None:
    async def test(joined: Joined) -> None:
        far, piece = joined.far, bytes(HIGH_WATER)
        far.takes = False
        written = 0

        async def write() -> None:
            nonlocal written
            while written < 64 * len(piece):
                joined.writer.write(piece)
                await joined.writer.drain()
                written += len(piece)

        writing = asyncio.create_task(write())
        stopped_at = await settled(lambda: written)
        assert stopped_at < 64 * len(piece)
        assert not writing.done()
        far.take()
        await writing

    with_joined(test)


@pytest.mark.parametrize("who", ["sandbox", "host"])
def test_an_end_by_force_is_an_error_for_reader_and_writer(who: str) -> None:
    async def test(joined: Joined) -> None:
        if who == "sandbox":
            joined.far.stream.reset("gone")
            joined.pair.guest.flush_soon()
        else:
            joined.transport.end("over", ConnectionResetError("over"))
        with pytest.raises(ConnectionResetError):
            await joined.reader.read()
        joined.writer.write(b"more")
        with pytest.raises(ConnectionResetError):
            await joined.writer.drain()
        assert joined.closed == [joined.transport]
        if who == "host":
            await until(lambda: joined.far.reset == "over")

    with_joined(test)


def test_what_was_written_before_a_close_arrives() -> None:
    async def test(joined: Joined) -> None:
        far = joined.far
        joined.writer.write(NOISE)
        joined.writer.close()
        await joined.writer.wait_closed()
        await until(lambda: far.finished)
        assert far.got == NOISE
        assert not joined.closed
        far.finish()
        await until(lambda: joined.closed)

    with_joined(test)


def test_a_sandbox_that_goes_on_after_a_close_is_stopped() -> None:
    async def test(joined: Joined) -> None:
        joined.writer.close()
        await joined.writer.wait_closed()
        joined.far.send(b"are you there?")
        await until(lambda: joined.far.reset is not None)
        assert joined.closed == [joined.transport]
        assert not joined.pair.host.mux.streams

    with_joined(test)


def test_an_abort_tells_the_sandbox_at_once() -> None:
    async def test(joined: Joined) -> None:
        joined.writer.write(NOISE)
        joined.writer.transport.abort()
        await until(lambda: joined.far.reset is not None)
        assert joined.writer.is_closing()
        assert joined.closed == [joined.transport]

    with_joined(test)
