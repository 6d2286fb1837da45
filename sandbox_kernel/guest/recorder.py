"""Recorder: keeps the kernel's latest output for a host that was not there to hear it.

A kernel's iopub socket drops messages without a subscriber. The recorder is a subscriber inside the
sandbox that outlives every host process: a server that was killed leaves nothing unheard, because
the next one gets the recording. It speaks just enough ZMTP to subscribe; a kernel that encrypts its
sockets cannot be recorded, and ``status`` says so. At most ``limit`` bytes are kept; the oldest
messages go first, and are counted.
"""

import json
import socket
import struct
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional

from ..wire import zmtp
from ..wire.event_loop import LoopLike
from ..wire.mux import Stream
from ..wire.peer import Peer

MAX_LIMIT = 256 * 2**20
_READ = 256 * 1024
_DRAIN = 64
_FIRST_INTERVAL, _MAX_INTERVAL = 0.004, 0.5
_ENCRYPTED = "the kernel's output socket does not speak plain ZMTP 3; is it encrypted?"

_SIZE = struct.Struct(">I")


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
        """Record this kernel and later ones; a limit of 0 ends it."""
        self.limit = limit
        self._trim()
        if limit and self._subscriber is None:
            self.launched()
        elif not limit:
            self._stop_listening()
        return self.status()

    def launched(self) -> None:
        """A kernel was launched."""
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
        """Write the messages from number ``since`` on to a stream: a line of JSON, then each
        message as its number of parts and the parts, each behind its size."""
        if self._subscriber is not None:
            self._subscriber.drain()
        start = min(max(0, since - self.first), len(self._kept))
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
        """A message was bigger than the limit."""
        self.first += len(self._kept) + 1
        self._kept.clear()
        self._size = 0

    def lost(self, why: str, final: bool) -> None:
        """The subscription has ended; another is tried unless that is ``final``."""
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


class _Subscriber:
    """One connection to a publisher's socket."""

    def __init__(self, loop: LoopLike, sock: socket.socket, recorder: Recorder) -> None:
        self._loop = loop
        self._sock = sock
        self._recorder = recorder
        self._reader = zmtp.ZmtpReader()
        self._subscribed = False
        self._parts: List[bytes] = []
        self._parts_size = 0
        self._skipping = False  # the rest of a message that is too big
        self._closed = False
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)
        self._send(zmtp.PLAIN_GREETING)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def drain(self) -> None:
        """Read what has arrived, so that the recording is complete."""
        for _ in range(_DRAIN):
            if self._closed or not self._readable():
                return

    def _fail(self, why: str, final: bool = False) -> None:
        self.close()
        self._recorder.lost(why, final)

    def _send(self, data: bytes) -> None:
        # A few bytes fit into the buffer of a new connection, or it is broken.
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
            if self._subscribed:
                self._fail("the kernel has closed its output socket")
            else:
                self._fail(_ENCRYPTED, True)
            return False
        self._reader.feed(data)
        greeting = self._reader.greeting
        if greeting is not None and not self._subscribed:
            if zmtp.speaks_plainly(greeting):
                self._subscribed = True
                self._send(zmtp.READY_SUB + zmtp.SUBSCRIBE_ALL)
            else:
                self._fail(_ENCRYPTED, True)
        self._read_frames()
        return not self._closed

    def _read_frames(self) -> None:
        while not self._closed:
            room = -1 if self._skipping else self._recorder.limit - self._parts_size
            frame = self._reader.next_frame(room)
            if frame is None:
                return
            self._skipping = self._skipping or frame.size > room
            self._part(frame.flags, frame.body)

    def _part(self, flags: int, part: bytes) -> None:
        if flags & zmtp.COMMAND:
            return  # READY, or a heartbeat
        self._parts.append(part)
        self._parts_size += len(part)
        if flags & zmtp.MORE:
            return
        parts, skipped = self._parts, self._skipping
        self._parts, self._parts_size, self._skipping = [], 0, False
        if skipped:
            self._recorder.too_big()
        else:
            self._recorder.add(parts)
