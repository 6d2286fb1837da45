"""Direct clients: kernel clients whose own connections the host has handed to the agent.

Where sandbox and client are on one machine, the host passes on the connections that it accepts
(SCM_RIGHTS), instead of carrying their bytes. So no thread of the host process is on the way, and a
busy host process delays nobody. The descriptors come over a socket of their own, the *carrier*, and
end with it: when the host is gone, so are its clients.
"""

import json
import os
import socket
from collections import deque
from typing import Any, Callable, Deque, Optional, Protocol, Set

from ..wire.descriptors import close_all, receive_with_descriptors
from ..wire.event_loop import LoopLike
from ..wire.frames import Buffer
from ..wire.mux import DEFAULT_WINDOW, HIGH_WATER, StreamHandler
from ..wire.pump import ByteStream, Flushes
from .connector import ACCEPTED
from .endpoints import CHANNELS
from .rekey import MAX_REQUEST

HELLO_TIMEOUT = 30.0
_MAX_UNREAD = 256 * 1024
"""Bytes of a client that the kernel has not taken; beyond them the client is not read."""
_MIN_READ, _MAX_READ = 8 * 1024, 256 * 1024


class Opens(Protocol):
    """Connects a client to a channel of the kernel (``targets``)."""

    def open_channel(self, peer: Flushes, stream: ByteStream, channel: str) -> None: ...


class Carrier:
    """Takes the connections of one host's clients, when ``admits`` has accepted its first line.
    ``on_known`` is called once: when that is decided, or the carrier has ended before."""

    def __init__(
        self,
        loop: LoopLike,
        sock: socket.socket,
        targets: Opens,
        admits: "Callable[[Carrier, Any], bool]",
        on_known: "Callable[[Carrier], object]",
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._targets = targets
        self._admits = admits
        self._on_known = on_known
        self._clients: Set[ClientStream] = set()
        self._hello = b""
        self._admitted = self._closed = False
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)
        self._timer = loop.call_later(HELLO_TIMEOUT, self.close)

    def close(self) -> None:
        """End it and its clients' connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._admitted:
            self._timer.cancel()
            self._on_known(self)
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for client in list(self._clients):
            client.lost("the host has gone")

    def _readable(self) -> None:
        try:
            data, fds = receive_with_descriptors(
                self._sock, 1 if self._admitted else MAX_REQUEST, 1
            )
        except BlockingIOError:
            return
        except OSError:
            return self.close()
        if not data:
            close_all(fds)
            return self.close()
        if self._admitted:
            return self._take(data[0], fds)
        close_all(fds)
        self._greet(data)

    def _greet(self, data: bytes) -> None:
        self._hello += data
        line, end, rest = self._hello.partition(b"\n")
        if not end and len(line) < MAX_REQUEST:
            return
        try:
            if not rest and self._admits(self, json.loads(line)):
                self._admitted = True
                self._timer.cancel()
                self._on_known(self)
                self._sock.send(ACCEPTED)
                return
        except (ValueError, RecursionError, OSError) as error:
            print("agent: a carrier of clients has failed:", error, flush=True)
        self.close()

    def _take(self, channel: int, fds: "list[int]") -> None:
        """A client, or none if no descriptor is left here: then it connects again."""
        for fd in fds:
            try:
                sock = socket.socket(fileno=fd)
            except OSError:  # no socket
                os.close(fd)
                continue
            if channel >= len(CHANNELS) or sock.family != socket.AF_UNIX:
                sock.close()
                continue
            client = ClientStream(self._loop, sock, self._clients.discard)
            self._clients.add(client)
            self._targets.open_channel(self, client, CHANNELS[channel])

    def flush_soon(self) -> None:
        """For pumps: nothing waits to be sent together."""


class ClientStream:
    """A client's connection, with the surface of ``wire.mux.Stream`` that pumps use."""

    def __init__(
        self,
        loop: LoopLike,
        sock: socket.socket,
        on_closed: "Callable[[ClientStream], object]",
    ) -> None:
        self.owner: Optional[StreamHandler] = None
        self.waiting = False
        self.closed = False
        self.widest = DEFAULT_WINDOW
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._on_closed = on_closed
        self._out: Deque[Buffer] = deque()
        self._buffered = 0
        self._unread = 0
        self._reading = True
        self._ended = False  # the client has closed its side
        self._finishing = False
        self._read_size = _MIN_READ
        sock.setblocking(False)
        loop.add_reader(self._fd, self._readable)

    @property
    def full(self) -> bool:
        return self._buffered >= HIGH_WATER

    def write(self, data: Buffer) -> None:
        """Send bytes, or keep what the client does not take yet."""
        if self.closed or self._finishing or not data:
            return
        self._out.append(data)
        self._buffered += len(data)
        if len(self._out) == 1:
            self._send()
            if self._out and not self.closed:
                self._loop.add_writer(self._fd, self._writable)

    def finish(self) -> None:
        """Close the connection after the bytes written so far."""
        if not self.closed and not self._finishing:
            self._finishing = True
            self._pause()
            if not self._out:
                self._close()

    def reset(self, reason: str) -> None:
        """Close the connection at once."""
        self._close()

    def consumed(self, size: int) -> None:
        """The kernel has taken ``size`` bytes."""
        self._unread -= size
        paused = not self._reading and not self._ended and not self._finishing
        if paused and self._unread < _MAX_UNREAD:
            self._reading = True
            self._loop.call_soon(self._read_again)

    def lost(self, why: str) -> None:
        """The connection has ended; its owner learns why."""
        if not self.closed:
            self._close()
            if self.owner is not None:
                self.owner.on_reset(why)

    def narrow(self, window: int) -> None:
        """Nothing is under way but what the two sockets hold."""

    def _read_again(self) -> None:
        if self._reading and not self.closed:
            self._loop.add_reader(self._fd, self._readable)

    def _pause(self) -> None:
        self._reading = False
        if not self.closed:
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(self._read_size)
        except BlockingIOError:
            return
        except OSError as error:
            return self.lost(str(error))
        if self.owner is None:
            return self._close()
        if not data:
            self._pause()
            self._ended = True
            self.owner.on_finished()
            return
        self._read_size = min(max(2 * len(data), _MIN_READ), _MAX_READ)
        self._unread += len(data)
        if self._unread >= _MAX_UNREAD:
            self._pause()
        self.owner.on_data(data)

    def _writable(self) -> None:
        self._send()
        if self.closed or self._out:
            return
        self._loop.remove_writer(self._fd)
        if self._finishing:
            owner = self.owner
            self._close()
            if owner is not None:
                owner.on_finished()

    def _send(self) -> None:
        out = self._out
        try:
            while out:
                sent = self._sock.send(out[0])
                self._buffered -= sent
                if sent == len(out[0]):
                    out.popleft()
                else:
                    out[0] = memoryview(out[0])[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            out.clear()
            self._buffered = 0
            # Not now: its owner is in the middle of something.
            self._loop.call_soon(self.lost, str(error))
            return
        if self.waiting and not self.full and self.owner is not None:
            self.waiting = False
            self._loop.call_soon(self.owner.on_room)

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._out.clear()
        self._buffered = 0
        self._sock.close()
        self._on_closed(self)
