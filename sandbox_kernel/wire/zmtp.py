"""ZMTP 3.0, ZeroMQ's protocol, as far as the agent reads and speaks it."""

from typing import NamedTuple, Optional

from .frames import Buffer

GREETING_SIZE = 64
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""

PLAIN_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""The greeting of a socket that neither encrypts nor authenticates."""
READY, HELLO = b"\x05READY", b"\x05HELLO"
SUB_SOCKET = b"\x0bSocket-Type\x00\x00\x00\x03SUB"
READY_SUB = bytes([COMMAND, len(READY + SUB_SOCKET)]) + READY + SUB_SOCKET
SUBSCRIBE_ALL = b"\x00\x01\x01"


class ZmtpFrame(NamedTuple):
    flags: int
    body: bytes
    size: int
    """Length of the body; ``body`` is empty if that is more than the reader wanted."""

    def encoded(self) -> bytes:
        """The frame as it was sent."""
        return (
            bytes([self.flags])
            + self.size.to_bytes(8 if self.flags & LONG else 1, "big")
            + self.body
        )


class ZmtpReader:
    """Cuts one direction of a connection into its greeting and its frames."""

    def __init__(self) -> None:
        self.greeting: Optional[bytes] = None
        self._data = bytearray()
        self._skip = 0  # bytes of a body that nobody wants
        self._more = False  # the last frame is not the last of its message

    def feed(self, data: Buffer) -> None:
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        self._data += data
        if self.greeting is None and len(self._data) >= GREETING_SIZE:
            self.greeting = bytes(self._data[:GREETING_SIZE])
            del self._data[:GREETING_SIZE]

    @property
    def next_flags(self) -> Optional[int]:
        """The flags of the next frame, if it has begun."""
        return self._data[0] if self.greeting is not None and self._data else None

    @property
    def between_messages(self) -> bool:
        """All that was fed has been read, and ends with a message."""
        return not self._data and not self._skip and not self._more

    def next_frame(self, most: int) -> Optional[ZmtpFrame]:
        """The next frame, if it is complete. One with a body longer than ``most`` comes without
        it, as soon as its header is there; the body is skipped."""
        data = self._data
        if self.greeting is None or len(data) < 2:
            return None
        flags = data[0]
        header = 9 if flags & LONG else 2
        if len(data) < header:
            return None
        size = int.from_bytes(data[1:header], "big")
        if size > most:
            here = min(size, len(data) - header)
            self._skip = size - here
            self._more = bool(flags & MORE)
            del data[: header + here]
            return ZmtpFrame(flags, b"", size)
        end = header + size
        if len(data) < end:
            return None
        body = bytes(data[header:end])
        self._more = bool(flags & MORE)
        del data[:end]
        return ZmtpFrame(flags, body, size)


def speaks_plainly(greeting: bytes) -> bool:
    """Is this the greeting of a ZMTP 3 socket without encryption?"""
    mechanism = greeting[12:32].rstrip(b"\0")
    return greeting[0] == 0xFF and greeting[10] >= 3 and mechanism == b"NULL"
