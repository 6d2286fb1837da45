"""Links: one stream to the agent, made by running the connector in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence

from sandbox_kernel.errors import LinkLost, ProtocolError, SessionRefused
from sandbox_kernel.guest.fdlink import LINK_BUFFER, FdLink
from sandbox_kernel.guest.peer import Link
from sandbox_kernel.guest.wire import WireError
from sandbox_kernel.guest.wire.codec import (
    BASE64,
    RAW,
    Base64Codec,
    PreambleFilter,
    RawCodec,
    make_codec,
)
from sandbox_kernel.guest.wire.frames import Buffer, Frame, FrameDecoder
from sandbox_kernel.guest.wire.handshake import (
    Hello,
    Refuse,
    Welcome,
    current_version,
    decode_answer,
    encode_hello,
)
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle
from sandbox_kernel.text import printable

log = logging.getLogger("sandbox_kernel.tunnel")

HANDSHAKE_TIMEOUT = 30.0


class StreamLink:
    """A Link over a provider's ExecStream, whose reads and writes are coroutines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stream: ExecStream) -> None:
        self.on_data: Callable[[bytes], object] = lambda data: None
        self.on_room: Callable[[], object] = lambda: None
        self.on_lost: Callable[[str], object] = lambda why: None
        self.on_closed: Callable[[], object] = lambda: None
        self.closed = False
        self._stream = stream
        self._most = stream.write_ahead or LINK_BUFFER
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._more = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._loop = loop
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            self._loop.create_task(self._read()),
            self._loop.create_task(self._write()),
        ]

    @property
    def room(self) -> int:
        return 0 if self.closed else max(0, self._most - self._pending_bytes)

    def hold(self) -> None:
        self._reading.clear()

    def release(self) -> None:
        self._reading.set()

    def write(self, buffers: Sequence[Buffer]) -> None:
        if not self.closed:
            self._pending += buffers
            self._pending_bytes += sum(map(len, buffers))
            self._more.set()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for task in self._tasks:
                if task is not asyncio.current_task(self._loop):
                    task.cancel()
            self.on_closed()

    def _lost(self, why: str) -> None:
        if not self.closed:
            self.close()
            self.on_lost(why)

    async def _read(self) -> None:
        try:
            while data := await self._stream.read():
                self.on_data(data)
                if self.closed:
                    return
                await self._reading.wait()
            self._lost("the far end closed the stream")
        except Exception as error:  # noqa: BLE001  (a provider's SDK may raise anything)
            self._lost(f"{type(error).__name__}: {error}")

    async def _write(self) -> None:
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                data, self._pending = b"".join(self._pending), []
                await self._stream.write(data)
                self._pending_bytes -= len(data)
                self.on_room()
                if self.closed:
                    return
        except Exception as error:  # noqa: BLE001
            self._lost(f"{type(error).__name__}: {error}")


class Connection:
    """A link whose handshake is done, with what ``Peer.attach`` needs to go on."""

    def __init__(self, link: Link, codec: str, checked: bool) -> None:
        self.link = link
        self.checked = checked
        self.decoder = FrameDecoder()
        self.incoming: RawCodec | Base64Codec = make_codec(codec)
        self.outgoing: RawCodec | Base64Codec = make_codec(codec)
        self.welcome: Welcome
        self.early: list[Frame] = []
        self._preamble = PreambleFilter()

    async def handshake(self, hello: Hello, sandbox: str) -> None:
        """Say HELLO and wait for the answer. SessionRefused if the agent will not have us."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Welcome | Refuse] = loop.create_future()

        def fail(error: Exception) -> None:
            if not answered.done():
                answered.set_exception(error)

        def lost(why: str) -> None:
            said = printable(self._preamble.skipped()[-1000:].decode(errors="replace")).strip()
            fail(LinkLost(f"The link to sandbox {sandbox!r} broke: {why}. {said}".strip()))

        def received(data: bytes) -> None:
            try:
                plain = self.incoming.decode(self._preamble.feed(data))
                frames = self.decoder.feed(plain) if plain else []
                if frames and not answered.done():
                    answered.set_result(decode_answer(frames.pop(0)))
                self.early += frames
            except WireError as error:
                kind = ProtocolError if error.fatal else LinkLost
                fail(kind(f"The agent in sandbox {sandbox!r} sent {error}."))
                self.link.close()

        self.link.on_data = received
        self.link.on_lost = lost
        self.link.write(self.outgoing.encode([encode_hello(hello)]))
        try:
            answer = await asyncio.wait_for(answered, HANDSHAKE_TIMEOUT)
        except asyncio.TimeoutError:
            self.link.close()
            raise LinkLost(f"The agent in sandbox {sandbox!r} did not answer.") from None
        except BaseException:
            self.link.close()
            raise
        if isinstance(answer, Refuse):
            self.link.close()
            raise SessionRefused(
                f"The agent in sandbox {sandbox!r} refused the session: "
                f"{printable(answer.message[:200])} ({printable(answer.code[:40])})."
            )
        if not current_version(answer) or answer.session != hello.session:
            self.link.close()
            raise ProtocolError(
                f"The agent in sandbox {sandbox!r} answered for another session or in another "
                f"version of the protocol ({answer.version})."
            )
        self.welcome = answer


async def connect(handle: SandboxHandle, folder: str, hello: Hello, *, codec: str) -> Connection:
    """Run a connector in the sandbox and shake hands with the agent through it.

    Raises LinkLost for what may pass, SessionRefused, ProtocolError or SandboxGone for what
    will not.
    """
    loop = asyncio.get_running_loop()
    connector = handle.guest_argv("connect", folder, codec)
    try:
        stream = await asyncio.wait_for(
            handle.open_stream(connector, duplex=True), HANDSHAKE_TIMEOUT
        )
    except asyncio.TimeoutError:
        raise LinkLost(
            f"No command could be started in sandbox {handle.name!r} within "
            f"{HANDSHAKE_TIMEOUT:g} s."
        ) from None
    link: FdLink | StreamLink
    if stream.socket is not None:
        # The link owns a descriptor of its own, so that stream.close() cannot pull it away.
        try:
            fd = os.dup(stream.socket.fileno())
        except OSError:
            await stream.close()
            raise
        link = FdLink(loop, fd, fd)
        checked = False
    else:
        link = StreamLink(loop, stream)
        checked = True
    link.on_closed = lambda: _close_later(loop, stream)
    connection = Connection(link, codec, checked)
    link.start()
    await connection.handshake(hello._replace(checked=checked), handle.name)
    return connection


_closing: set[asyncio.Task[None]] = set()


def _close_later(loop: asyncio.AbstractEventLoop, stream: ExecStream) -> None:
    async def close() -> None:
        try:
            await asyncio.wait_for(stream.close(), HANDSHAKE_TIMEOUT)
        except Exception as error:  # noqa: BLE001  (a provider's SDK may raise anything)
            log.debug("closing an exec stream: %s", error)

    task = loop.create_task(close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def links_closed() -> None:
    """Wait until the exec streams of closed links are closed, too."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*_closing), HANDSHAKE_TIMEOUT)


def codec_for(byte_exact: bool) -> str:
    return RAW if byte_exact else BASE64
