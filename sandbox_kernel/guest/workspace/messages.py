"""Messages over a socket: a length, a kind, a payload. Both ends block."""

import enum
import json
import select
import socket
import struct
from typing import Any, List, Tuple

HEADER = struct.Struct(">IB")
MAX_MESSAGE = 16 * 2**20
_BUFFER = 2**20


class Kind(enum.IntEnum):
    """Kinds of messages: from the host, then from the sandbox."""

    PERSIST, WANT, DONE, RULES = b"PWDr"
    STAGE, FILL, REUSE, FINISH = b"SFUZ"
    OFFER, OBJECT, RESULT, FAILED, IGNORE, NOTE = b"OBREIN"


class Ended(Exception):
    """The other end has closed the connection."""


class Stalled(Ended):
    """The other end neither sent nor read anything within the socket's timeout."""


class Messages:
    """One connection. ``received`` and ``sent`` count bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = self.sent = 0
        self._buffer = bytearray(_BUFFER)
        self._start = self._end = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, kind: int, *parts: "bytes | memoryview") -> None:
        size = sum(len(part) for part in parts)
        self.sent += HEADER.size + size
        buffers: "List[bytes | memoryview]" = [HEADER.pack(size, kind), *parts]
        try:
            while buffers:
                sent = self.sock.sendmsg(buffers)
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if sent:
                    buffers[0] = memoryview(buffers[0])[sent:]
        except socket.timeout:
            raise Stalled("it reads nothing") from None
        except OSError as error:
            raise Ended(str(error)) from None

    def send_json(self, kind: int, value: Any) -> None:
        self.send(kind, json.dumps(value, separators=(",", ":")).encode())

    def receive(self) -> "Tuple[int, bytes | bytearray]":
        """The next message. ValueError if it is too long."""
        size, kind = HEADER.unpack(self._take(HEADER.size))
        if size > MAX_MESSAGE:
            raise ValueError("a message of %d bytes" % size)
        return kind, self._take(size)

    def waiting(self) -> bool:
        """Whether a message has begun to arrive."""
        return self._end > self._start or bool(self._poll.poll(0))

    def _take(self, size: int) -> "bytes | bytearray":
        have = self._end - self._start
        if have < size <= _BUFFER // 4:
            self._buffer[:have] = self._buffer[self._start : self._end]
            self._start, self._end = 0, have
            while self._end < size:
                self._end += self._read(memoryview(self._buffer)[self._end :])
            have = self._end
        if have >= size:
            data = bytes(memoryview(self._buffer)[self._start : self._start + size])
            self._start += size
            return data
        large = bytearray(size)
        large[:have] = self._buffer[self._start : self._end]
        self._start = self._end = 0
        view = memoryview(large)
        while have < size:
            have += self._read(view[have:])
        return large

    def _read(self, view: memoryview) -> int:
        try:
            count = self.sock.recv_into(view)
        except socket.timeout:
            raise Stalled("it sends nothing") from None
        except OSError as error:
            raise Ended(str(error)) from None
        if not count:
            raise Ended("closed")
        self.received += count
        return count
