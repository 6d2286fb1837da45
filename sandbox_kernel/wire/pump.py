"""Pump: carries bytes between a stream of the multiplexer and a local socket."""

import socket
from collections import deque
from typing import Callable, Deque, Optional, Protocol

from .event_loop import LoopLike
from .frames import Buffer
from .mux import DEFAULT_WINDOW, StreamHandler

_MIN_READ, _MAX_READ = 8 * 1024, 256 * 1024
_SMALL = 32 * 1024
_PERIOD = 0.25
"""Seconds between two measurements of how much the socket's reader takes."""
_AHEAD, _BEHIND = 1.0, 0.5
"""Seconds' worth of data that may be under way to the reader: the first if it keeps up, the second
if it was behind for a whole period. A client reads all output under way before it sees the end of
an interrupted cell, so that must be little, however long the link is."""


class ByteStream(Protocol):
    """What a pump needs of a stream: ``mux.Stream``, or a client's own connection."""

    owner: Optional[StreamHandler]
    closed: bool
    waiting: bool
    widest: int

    @property
    def full(self) -> bool: ...
    def write(self, data: Buffer) -> None: ...
    def finish(self) -> None: ...
    def reset(self, reason: str) -> None: ...
    def consumed(self, size: int) -> None: ...
    def narrow(self, window: int) -> None: ...


class Flushes(Protocol):
    """Sends what was written to streams: ``peer.Peer``."""

    def flush_soon(self) -> None: ...


class Pump:
    """Owns a connected socket and one stream until both have ended.

    Backpressure goes both ways: the socket is not read while the stream is full, and the peer gets
    credit only for bytes that the socket has taken. ``on_input`` is called when the socket has sent
    something; ``polite`` gives the seconds to wait before the next read.
    """

    def __init__(
        self,
        loop: LoopLike,
        peer: Flushes,
        stream: ByteStream,
        sock: socket.socket,
        on_closed: "Callable[[Pump], object] | None" = None,
        on_input: "Callable[[], object] | None" = None,
        polite: "Callable[[], float] | None" = None,
        widest: int = 0,
    ) -> None:
        self.moved_at = 0.0
        """When bytes last passed, in either direction, by the loop's clock."""
        self._loop = loop
        self._peer = peer
        self._stream = stream
        self._sock = sock
        self._fd = sock.fileno()
        self._on_closed = on_closed
        self._on_input = on_input
        self._polite = polite
        self._out: Deque[Buffer] = deque()
        self._writing = False
        self._measured_at = 0.0
        self._taken = 0  # bytes, by the reader, since then
        self._caught_up = True  # the reader, at some time since then
        self._widest = widest  # 0: by the reader's speed
        stream.widest = widest or DEFAULT_WINDOW
        self._finish_after_out = False
        self._closed = False
        self._read_size = _MIN_READ
        stream.owner = self
        sock.setblocking(False)
        loop.add_reader(self._fd, self._readable)

    def close(self, reason: str) -> None:
        """Close both sides at once."""
        self._stream.reset(reason)
        self._peer.flush_soon()
        self._close_socket()

    # --- from the socket to the stream

    def _hung_up(self, reason: str) -> None:
        """The far end of the socket has closed it. ``reason`` is empty if it did so in order."""
        if reason:
            return self.close(reason)
        self._loop.remove_reader(self._fd)
        self._stream.finish()
        self._peer.flush_soon()
        if self._stream.closed:
            self._close_socket()

    def _received(self, data: Buffer) -> Buffer:
        """For subclasses: bytes of the socket. What is returned goes to the stream."""
        return data

    def _readable(self) -> None:
        try:
            data = self._sock.recv(self._read_size)
        except BlockingIOError:
            return
        except OSError as error:
            return self._hung_up(str(error))
        if not data:
            return self._hung_up("")
        self._read_size = min(max(2 * len(data), _MIN_READ), _MAX_READ)
        if self._on_input is not None:
            self._on_input()
        self.moved_at = self._loop.time()
        self._stream.write(self._received(data))
        self._peer.flush_soon()
        if self._stream.full:
            self._stream.waiting = True
            self._loop.remove_reader(self._fd)
        elif self._polite is not None:
            self._loop.remove_reader(self._fd)
            self.on_room()

    def on_room(self) -> None:
        pause = self._polite() if self._polite is not None else 0.0
        if pause:
            self._loop.call_later(pause, self._read_again)
        else:
            self._read_again()

    def _read_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._fd, self._readable)

    # --- from the stream to the socket

    def on_data(self, payload: Buffer) -> None:
        self.moved_at = self._loop.time()
        if self._closed:
            self._stream.consumed(len(payload))
        elif self._out:
            # A payload is a view of a whole read of the link. A small one that must wait is
            # copied, or a few bytes of credit could hold much memory.
            self._out.append(bytes(payload) if len(payload) < _SMALL else payload)
        else:
            self._out.append(payload)
            self._write_some()

    def on_finished(self) -> None:
        self._finish_after_out = True
        if not self._out:
            self._finish()

    def on_reset(self, reason: str) -> None:
        self._close_socket()

    def _writable(self) -> None:
        self._write_some()
        self._peer.flush_soon()

    def _write_some(self) -> None:
        out = self._out
        try:
            while out:
                first = out[0]
                sent = self._sock.send(first)
                self._taken += sent
                self._stream.consumed(sent)
                if sent == len(first):
                    out.popleft()
                else:
                    out[0] = memoryview(first)[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            return self._write_failed(str(error))
        if bool(out) != self._writing:
            self._writing = bool(out)
            if self._writing:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)
        self._caught_up = self._caught_up or not out
        self._pace()
        if not out and self._finish_after_out:
            self._finish()

    def _write_failed(self, reason: str) -> None:
        self.close(reason)

    def _pace(self) -> None:
        now = self._loop.time()
        passed = now - self._measured_at
        if passed < _PERIOD:
            return
        rate = self._taken / passed
        self._stream.widest = self._widest or max(DEFAULT_WINDOW, int(rate * _AHEAD))
        if not self._caught_up:
            self._stream.narrow(int(rate * _BEHIND))
        self._measured_at, self._taken, self._caught_up = now, 0, not self._out

    def _finish(self) -> None:
        """The far side has sent FIN. ZMTP has no half-open connections, so neither have we."""
        self._stream.finish()
        self._peer.flush_soon()
        self._close_socket()

    def _close_socket(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._out.clear()
        self._sock.close()
        if self._on_closed is not None:
            self._on_closed(self)
