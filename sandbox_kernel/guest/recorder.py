"""Recorder: keeps the last of what the kernel publishes, for a host that was not there to hear it.

A kernel's iopub socket drops what nobody has subscribed to. While the recorder is on, it is one
more subscriber, inside the sandbox, that outlives every host process: what a server missed because
it was killed is handed over, in order, to the next one. It speaks just enough ZMTP 3.0 (NULL
mechanism) to subscribe; a kernel that encrypts its sockets cannot be recorded, and ``status`` says
so. What is kept is bounded by ``limit`` bytes; the oldest goes first, and is counted.
"""

import json
import socket
import struct
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional

from .loop import LoopLike
from .peer import Peer
from .wire.frames import Buffer
from .wire.mux import Stream
from .zmtp import COMMAND, GREETING_SIZE, LONG, MORE, SUBSCRIBE_ALL

MAX_LIMIT = 256 * 2**20
_READ = 256 * 1024
_DRAIN = 64
_FIRST_INTERVAL, _MAX_INTERVAL = 0.004, 0.5

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY_BODY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"SUB"
_READY = bytes([COMMAND, len(_READY_BODY)]) + _READY_BODY
_SIZE = struct.Struct(">I")
_LONG_SIZE = struct.Struct(">Q")


class Recorder:
    """Messages are numbered from 0; ``first`` is the number of the oldest that is kept."""

    def __init__(
        self,
        loop: LoopLike,
        connect: Callable[[], Optional[socket.socket]],
        running: Callable[[], bool],
    ) -> None:
        self.first = 0
        self._loop = loop
        self._connect = connect
        self._running = running
        self.limit = 0
        self._kept: Deque[bytes] = deque()
        self._size = 0
        self._subscriber: Optional[_Subscriber] = None
        self._interval = _FIRST_INTERVAL
        self._timer: object = None
        self._problem = ""

    def start(self, limit: int) -> Dict[str, Any]:
        """Record from now on, also kernels that are launched later; 0 ends it."""
        self.limit = limit
        self._trim()
        if limit and self._subscriber is None:
            self.launched()
        elif not limit:
            self._stop_listening()
        return self.status()

    def launched(self) -> None:
        """There is a kernel, or a new one."""
        if self.limit:
            self._stop_listening()
            self._problem = ""
            self._interval = _FIRST_INTERVAL
            self._try()

    def status(self) -> Dict[str, Any]:
        return {
            "limit": self.limit,
            "first": self.first,
            "next": self.first + len(self._kept),
            "bytes": self._size,
            "problem": self._problem,
        }

    def send(self, peer: Peer, stream: Stream, since: int) -> None:
        """Write what is kept, from number ``since`` on, to a stream: a line of JSON, then each
        message as its number of parts and the parts, each with its size before it."""
        if self._subscriber is not None:
            self._subscriber.drain()
        start = min(max(0, since - self.first), len(self._kept))
        stream.owner = _Reader(stream)
        status = self.status()
        status["first"] = self.first + start
        stream.write(json.dumps(status).encode() + b"\n")
        for index, message in enumerate(self._kept):
            if index >= start:
                stream.write(message)
        stream.finish()
        peer.flush_soon()

    # --- from the subscriber

    def add(self, parts: List[bytes]) -> None:
        pieces = [_SIZE.pack(len(parts))]
        for part in parts:
            pieces += (_SIZE.pack(len(part)), part)
        message = b"".join(pieces)
        self._kept.append(message)
        self._size += len(message)
        self._trim()

    def too_big(self) -> None:
        """A message that is bigger than all that may be kept."""
        self.first += len(self._kept) + 1
        self._kept.clear()
        self._size = 0

    def lost(self, why: str, final: bool) -> None:
        """The subscription has ended; unless the kernel has, too, there will be another."""
        self._subscriber = None
        self._problem = why
        if not final:
            self._again()

    def _trim(self) -> None:
        while self._size > self.limit and self._kept:
            self._size -= len(self._kept.popleft())
            self.first += 1

    def _stop_listening(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _try(self) -> None:
        self._timer = None
        if self._subscriber is not None or not self.limit or not self._running():
            return
        try:
            sock = self._connect()
        except OSError as error:
            self._problem = str(error)
            sock = None
        if sock is None:
            return self._again()
        self._problem = ""
        self._subscriber = _Subscriber(self._loop, sock, self)

    def _again(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval, self._try)
            self._interval = min(2 * self._interval, _MAX_INTERVAL)


class _Reader:
    """The host's end of a stream on which it only listens."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def on_data(self, payload: Buffer) -> None:
        self._stream.consumed(len(payload))

    def on_finished(self) -> None:
        """It has nothing to say."""

    def on_reset(self, reason: str) -> None:
        """It has changed its mind."""

    def on_room(self) -> None:
        """All has been written at once."""


class _Subscriber:
    """One connection to a publisher's socket."""

    def __init__(self, loop: LoopLike, sock: socket.socket, recorder: Recorder) -> None:
        self._loop = loop
        self._sock = sock
        self._recorder = recorder
        self._data = bytearray()
        self._greeted = False
        self._parts: List[bytes] = []
        self._parts_size = 0
        self._skip = 0
        self._skipping = False
        self._closed = False
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)
        self._send(_GREETING)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def drain(self) -> None:
        """Take what has arrived, before somebody is told what there is."""
        for _ in range(_DRAIN):
            if self._closed or not self._readable():
                return

    def _fail(self, why: str, final: bool = False) -> None:
        self.close()
        self._recorder.lost(why, final)

    def _send(self, data: bytes) -> None:
        # A few bytes on a new connection: they fit into its buffer, or it is broken.
        try:
            if self._sock.send(data) != len(data):
                self._fail("the kernel's output socket takes nothing")
        except OSError as error:
            self._fail(str(error))

    def _readable(self) -> bool:
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return False
        except OSError as error:
            self._fail(str(error))
            return False
        if not data:
            if self._greeted:
                self._fail("the kernel has closed its output socket")
            else:
                self._fail("the kernel does not speak plainly; is its output encrypted?", True)
            return False
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        self._data += data
        self._parse()
        return not self._closed

    def _parse(self) -> None:
        if not self._greeted and not self._greet():
            return
        data, start = self._data, 0
        while not self._closed and len(data) - start >= 2:
            flags = data[start]
            if flags & LONG:
                if len(data) - start < 9:
                    break
                size, body = _LONG_SIZE.unpack_from(data, start + 1)[0], start + 9
            else:
                size, body = data[start + 1], start + 2
            if self._skipping or self._parts_size + size > self._recorder.limit:
                self._skipping = True
                left = len(data) - body
                self._skip = max(0, size - left)
                start = body + min(size, left)
                self._part(flags, b"")
                continue
            if len(data) - body < size:
                break
            self._part(flags, bytes(data[body : body + size]))
            start = body + size
        del data[:start]

    def _greet(self) -> bool:
        if len(self._data) < GREETING_SIZE:
            return False
        greeting = bytes(self._data[:GREETING_SIZE])
        mechanism = greeting[12:32].rstrip(b"\0")
        if greeting[0] != 0xFF or greeting[10] < 3 or mechanism != b"NULL":
            self._fail("the kernel does not speak plainly; is its output encrypted?", True)
            return False
        del self._data[:GREETING_SIZE]
        self._greeted = True
        self._send(_READY + SUBSCRIBE_ALL)
        return not self._closed

    def _part(self, flags: int, part: bytes) -> None:
        if flags & COMMAND:
            return  # READY, or a heartbeat that was not asked for
        self._parts.append(part)
        self._parts_size += len(part)
        if flags & MORE:
            return
        parts, skipped = self._parts, self._skipping
        self._parts, self._parts_size, self._skipping = [], 0, False
        if skipped:
            self._recorder.too_big()
        else:
            self._recorder.add(parts)
