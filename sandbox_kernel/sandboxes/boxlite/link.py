"""The host's end of a link to a box: requests and commands, as streams of the wire.

One link a box: an execution of the connector, whose text streams carry the wire in base64;
``guest/commands/box.py`` is the far end. Whatever comes from the box is checked: what the wire does
not allow ends the link, and with it the commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from sandbox_kernel.errors import SandboxError, SandboxGone, SandboxTimeout
from sandbox_kernel.guest.commands.box import REQUEST, STDERR, STDIO
from sandbox_kernel.guest.commands.process_one import MAX_REQUEST
from sandbox_kernel.sandboxes.channel import Hangup
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.controlled_stream import ControlledStream, check_started
from sandbox_kernel.sandboxes.stream_link import ByteStream, StreamLink
from sandbox_kernel.untrusted_text import printable
from sandbox_kernel.wire.codec import BASE64
from sandbox_kernel.wire.connection import Connection
from sandbox_kernel.wire.frames import Buffer
from sandbox_kernel.wire.mux import INITIAL_WINDOW, INTERACTIVE, URGENT, Stream
from sandbox_kernel.wire.peer import Peer

_log = logging.getLogger(__name__)

_MAX_ANSWER = 8 * 2**20
_PIECE = 64 * 1024
_START_TIMEOUT, _REPLY_TIMEOUT, _CLOSE_TIMEOUT = 60.0, 30.0, 15.0


class Carrier(ByteStream, Protocol):
    """What a link needs of an execution."""

    async def close(self) -> None: ...


class StreamPort:
    """The host's end of one stream of a link, as a port of a ControlledStream."""

    def __init__(self, peer: Peer, stream: Stream) -> None:
        self._peer = peer
        self._stream = stream
        self._pieces: deque[bytes] = deque()
        self._ended = self._broken = False
        self._arrived, self._room = asyncio.Event(), asyncio.Event()
        stream.owner = self
        stream.widest = INITIAL_WINDOW

    async def read(self) -> bytes:
        while not self._pieces and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._stream.consumed(len(data))
        self._peer.flush_soon()
        return data

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            while self._stream.full and not self._broken:
                self._stream.waiting = True
                self._room.clear()
                await self._room.wait()
            if self._broken:
                raise BrokenPipeError("the command's stdin is closed")
            self._stream.write(bytes(view[start : start + _PIECE]))
            self._peer.flush_soon()

    def end_input(self) -> None:
        self._stream.finish()
        self._peer.flush_soon()

    def break_input(self) -> None:
        """Nobody reads what is written here."""
        self._broken = True
        self._room.set()

    def close(self) -> None:
        self._stream.reset("closed")
        self._peer.flush_soon()
        self._pieces.clear()
        self.on_reset("")

    def on_data(self, payload: Buffer) -> None:
        self._pieces.append(bytes(payload))
        self._arrived.set()

    def on_finished(self) -> None:
        self._ended = True
        self._arrived.set()

    def on_reset(self, reason: str) -> None:
        self.on_finished()
        self.break_input()

    def on_room(self) -> None:
        self._room.set()


class BoxRequest(StreamPort):
    """One request to process 1 of a box, and the control of the command that it starts."""

    stdin: StreamPort | None = None

    def __init__(self, peer: Peer, stream: Stream, sandbox: str) -> None:
        super().__init__(peer, stream)
        self.id = stream.id
        self._sandbox = sandbox
        self._received = b""

    async def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_REQUEST:
            raise SandboxError(
                f"A command with arguments and environment of {len(line)} bytes is too long for "
                f"sandbox {self._sandbox!r}, which takes {MAX_REQUEST}. Pass large values through "
                f"a file or stdin."
            )
        self._stream.write(line)
        self._peer.flush_soon()

    async def receive(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            data = await self.read()
            if not data:
                raise Hangup
            self._received += data
            if len(self._received) > _MAX_ANSWER:
                raise SandboxError(f"Sandbox {self._sandbox!r} sent an answer that is too long.")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise SandboxError(f"Sandbox {self._sandbox!r} sent an answer that is not JSON.")
        return message

    hang_up = StreamPort.end_input

    def on_finished(self) -> None:
        super().on_finished()
        if self.stdin is not None:
            self.stdin.break_input()


class BoxLink:
    """The way to one box. ``closed`` is set when it is over, whatever the cause.

    ``why_lost`` is called once then; it gives the error that the users of the commands get.
    """

    def __init__(
        self, carrier: Carrier, sandbox: str, why_lost: Callable[[], Awaitable[SandboxError]]
    ) -> None:
        self.closed = asyncio.Event()
        self.sandbox = sandbox
        self.error: SandboxError | None = None
        self._carrier = carrier
        self._why_lost = why_lost
        self._ending: asyncio.Task[None] | None = None
        self._link = StreamLink(carrier)
        self._peer = Peer(asyncio.get_running_loop(), host=True)
        self._peer.on_link_lost = self._peer.on_broken = self._lost
        self._peer.attach(
            self._link,
            Connection.without_handshake(self._peer.mux, BASE64, self._peer.clock(), preamble=True),
        )
        self._link.start()

    async def configure(
        self, lease: float, env: Mapping[str, str], workdir: str, *, timeout: float
    ) -> None:
        """The first request: when it is answered, the box is ready for commands."""
        answer = await self.request(
            "configure", timeout, lease=lease, env=dict(env), workdir=workdir
        )
        if "error" in answer:
            why = printable(str(answer.get("message"))[:500])
            raise SandboxError(f"Sandbox {self.sandbox!r} could not be set up: {why}.")

    async def request(
        self, kind: str, timeout: float = _REPLY_TIMEOUT, **fields: Any
    ) -> dict[str, Any]:
        """Send a request and wait for its answer, which is not to be trusted."""
        request = self._open_request()
        try:
            return await self._ask(request, kind, timeout, fields)
        finally:
            request.close()

    async def spawn(self, command: Command) -> None:
        answer = await self.request("spawn", _START_TIMEOUT, **command.to_json())
        check_started(answer, command, self.sandbox)

    async def open(self, command: Command) -> ControlledStream:
        """Start a command. ExecFailed if that cannot be done."""
        request = self._open_request()
        request.stdin = stdio = self._open_port(f"{STDIO}:{request.id}")
        ports = [stdio]
        if not command.duplex and not command.tty:
            ports.append(self._open_port(f"{STDERR}:{request.id}"))
        try:
            answer = await self._ask(request, "exec", _START_TIMEOUT, command.to_json())
            check_started(answer, command, self.sandbox)
        except BaseException:
            for port in (request, *ports):
                port.close()
            raise
        return ControlledStream(request, self._gone, ports, terminal=command.tty is not None)

    def _open_request(self) -> BoxRequest:
        if self.closed.is_set():
            raise self._gone()
        return BoxRequest(self._peer, self._peer.mux.open(REQUEST, URGENT), self.sandbox)

    def _open_port(self, target: str) -> StreamPort:
        # Without more window than this, a flood of output waits in the box.
        return StreamPort(self._peer, self._peer.mux.open(target, INTERACTIVE, INITIAL_WINDOW))

    async def _ask(
        self, request: BoxRequest, kind: str, timeout: float, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                await request.send({"kind": kind, **fields})
                return await request.receive()
        except TimeoutError:
            raise SandboxTimeout(
                f"Sandbox {self.sandbox!r} did not answer {kind!r} within {timeout:g} s."
            ) from None
        except Hangup:
            raise self._gone() from None

    def _gone(self) -> SandboxError:
        return self.error or SandboxGone(f"The link to sandbox {self.sandbox!r} is closed.")

    # --- the end

    def _lost(self, why: str) -> None:
        if self._ending is None:
            _log.info("The link to sandbox %s is over: %s", self.sandbox, printable(why[:300]))
            self.closed.set()
            self._ending = asyncio.get_running_loop().create_task(self._end(why))

    async def _end(self, why: str) -> None:
        try:
            self.error = self.error or await self._why_lost()
        except Exception as error:  # noqa: BLE001  (an SDK may raise anything)
            self.error = SandboxError(f"Sandbox {self.sandbox!r} was lost: {why}; {error}.")
        for stream in self._peer.mux.close():
            if isinstance(stream.owner, StreamPort):
                stream.owner.on_reset(why)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._link.ended()
                await self._carrier.close()

    async def close(self) -> None:
        """End the link; the box ends its commands. Idempotent."""
        if self._ending is None:
            self.error = self._gone()
            self._peer.detach()
            self._lost("it was closed")
        assert self._ending is not None
        await asyncio.shield(self._ending)
