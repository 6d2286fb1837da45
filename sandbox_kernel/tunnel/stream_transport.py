"""A stream of the wire as a connection of asyncio, without a socket in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sandbox_kernel.wire.frames import Buffer
from sandbox_kernel.wire.mux import DEFAULT_WINDOW, Stream
from sandbox_kernel.wire.peer import Peer

READ_LIMIT = 256 * 1024
"""What the reader keeps before the far end has to wait."""
_SMALL = 32 * 1024


def connect(
    peer: Peer, stream: Stream, on_closed: Callable[[StreamTransport], object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, StreamTransport]:
    """What ``asyncio.open_connection`` would give, and its transport. ``on_closed`` is called when
    both directions have ended."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_LIMIT, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport = StreamTransport(peer, stream, protocol, on_closed)
    protocol.connection_made(transport)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop), transport


class StreamTransport(asyncio.Transport):
    """Owns a stream until both of its directions have ended.

    The protocol is paused while the stream is full; the far end gets credit only for bytes that the
    protocol was given, and it is given none while it has paused reading.
    """

    def __init__(
        self,
        peer: Peer,
        stream: Stream,
        protocol: asyncio.Protocol,
        on_closed: Callable[[StreamTransport], object],
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._stream = stream
        self._protocol = protocol
        self._on_closed = on_closed
        self._waiting: deque[Buffer] = deque()  # while reading is paused
        self._reading = True
        self._far_ended = self._near_ended = False
        self._eof_given = False
        self._lost = False
        """The protocol knows that the connection is over, or soon will."""
        self._over = False
        stream.owner = self
        stream.widest = DEFAULT_WINDOW  # whatever the sandbox says: there may be many

    # --- what the gateway calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._near_ended or not data:
            return
        self._stream.write(data if isinstance(data, bytes) else bytes(data))
        self._peer.flush_soon()
        if self._stream.full and not self._stream.waiting:
            self._stream.waiting = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._near_ended:
            self._near_ended = True
            self._stream.finish()
            self._peer.flush_soon()
            self._look_for_end()

    def close(self) -> None:
        """What was written still goes to the far end, which may say no more."""
        if not self._lost:
            self.write_eof()
            self._lose(None)

    def abort(self) -> None:
        self.end("aborted")

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End both directions at once."""
        self._stream.reset(reason)
        self._peer.flush_soon()
        self._near_ended = self._far_ended = True
        self._lose(error)
        self._look_for_end()

    def is_closing(self) -> bool:
        return self._lost

    def is_reading(self) -> bool:
        return self._reading and not self._lost

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._give)

    def get_write_buffer_size(self) -> int:
        return self._stream.buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The stream has its own."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    # --- what the stream calls

    def on_data(self, payload: Buffer) -> None:
        if self._lost:
            return self.end("nobody listens")
        if self._waiting or not self._reading:
            return self._keep(payload)
        self._waiting.append(payload)
        self._give()

    def on_finished(self) -> None:
        self._far_ended = True
        self._give()
        self._look_for_end()

    def on_reset(self, reason: str) -> None:
        self._near_ended = self._far_ended = True
        self._lose(ConnectionResetError(f"the sandbox ended the connection: {reason[:200]!a}"))
        self._look_for_end()

    def on_room(self) -> None:
        if not self._lost:
            self._protocol.resume_writing()

    # ---

    def _keep(self, payload: Buffer) -> None:
        """A payload is a view of a whole read of the link. Small ones that must wait are copied
        together, or a few bytes of credit could hold much memory."""
        if len(payload) >= _SMALL:
            return self._waiting.append(payload)
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, bytearray) and len(last) < _SMALL:
            last += payload
        else:
            self._waiting.append(bytearray(payload))

    def _give(self) -> None:
        """Give the protocol what has arrived, as long as it reads."""
        while self._waiting and self._reading and not self._lost:
            payload = self._waiting.popleft()
            self._protocol.data_received(payload)  # type: ignore[arg-type]  # any buffer will do
            self._stream.consumed(len(payload))
        self._peer.flush_soon()
        if self._far_ended and not self._waiting and not self._eof_given and not self._lost:
            self._eof_given = True
            if not self._protocol.eof_received():
                self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._waiting.clear()
            self._loop.call_soon(self._protocol.connection_lost, error)

    def _look_for_end(self) -> None:
        if self._near_ended and self._far_ended and not self._over:
            self._over = True
            self._on_closed(self)
