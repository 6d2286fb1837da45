"""The name in a TLS ClientHello, so that a client cannot be let through for one host and ask a
shared server for another (fronting), and the protocols. A parser for ByteSource; no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox_kernel.gateway.refusals import Refusal

MAX_HELLO = 64 * 1024
_HANDSHAKE, _CLIENT_HELLO = 22, b"\x01"
_SERVER_NAME, _HOST_NAME = 0, 0
_PROTOCOLS = 16
_MOST_PROTOCOLS = 32
_MOST_RECORD = 1 << 14
_MOST_RECORDS = 128


class BadHello(Refusal):
    """What begins like TLS is not."""

    def __init__(self, why: str) -> None:
        super().__init__(403, f"bad TLS: {why}")


@dataclass(frozen=True)
class FirstBytes:
    """What a client's first bytes say. They stay in the buffer."""

    is_tls: bool
    server_name: bytes | None = None
    protocols: tuple[bytes, ...] = ()
    """What the client would speak inside (ALPN)."""


def look_at(buffer: bytearray) -> FirstBytes | None:
    """Whether a client's first bytes are a ClientHello, and for whom; None: too few yet. BadHello
    if they begin like one and are not."""
    if not buffer:
        return None
    if buffer[0] != _HANDSHAKE or (len(buffer) > 1 and buffer[1] != 3):
        return FirstBytes(is_tls=False)
    message = _message(buffer)
    if message is None:
        if len(buffer) >= MAX_HELLO:
            raise BadHello("the ClientHello is too long")
        return None
    return _read(message)


def _message(buffer: bytearray) -> bytes | None:
    """The ClientHello without its header, gathered from the records that carry it."""
    message, at, records = b"", 0, 0
    while len(buffer) >= at + 5:
        records += 1
        if records > _MOST_RECORDS:
            raise BadHello("the ClientHello is in too many records")
        size = int.from_bytes(buffer[at + 3 : at + 5], "big")
        if buffer[at] != _HANDSHAKE or buffer[at + 1] != 3 or not 0 < size <= _MOST_RECORD:
            raise BadHello("a record is not part of a handshake")
        message += bytes(buffer[at + 5 : at + 5 + size])
        if message[:1] not in (b"", _CLIENT_HELLO):
            raise BadHello("the handshake does not begin with a ClientHello")
        if len(message) >= 4:
            length = int.from_bytes(message[1:4], "big")
            if length > MAX_HELLO:
                raise BadHello("the ClientHello is too long")
            if len(message) >= 4 + length:
                return message[4 : 4 + length]
        at += 5 + size
    return None


class _Fields:
    """Reads fields with a length before them; BadHello if they are not there."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)  # what is left of it is no copy

    def __bool__(self) -> bool:
        return bool(self._data)

    def skip(self, size: int) -> None:
        self._take(size)

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def block(self, length_size: int) -> memoryview:
        return self._take(self.number(length_size))

    def _take(self, size: int) -> memoryview:
        if size > len(self._data):
            raise BadHello("the ClientHello is cut short")
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def _read(message: bytes) -> FirstBytes:
    hello = _Fields(message)
    hello.skip(2 + 32)  # version, random
    hello.block(1)  # session
    hello.block(2)  # cipher suites
    hello.block(1)  # compression
    if not hello:
        return FirstBytes(is_tls=True)
    extensions = _Fields(hello.block(2))
    names: list[bytes] = []
    protocols: list[bytes] = []
    while extensions:
        kind, content = extensions.number(2), extensions.block(2)
        if kind == _SERVER_NAME:
            listed = _Fields(_Fields(content).block(2))
            while listed:
                kind_of_name, name = listed.number(1), listed.block(2)
                if kind_of_name == _HOST_NAME:
                    names.append(bytes(name))
        elif kind == _PROTOCOLS:
            offered = _Fields(_Fields(content).block(2))
            while offered and len(protocols) < _MOST_PROTOCOLS:
                protocols.append(bytes(offered.block(1)))
    if len(names) > 1:
        raise BadHello("the ClientHello names two hosts")
    return FirstBytes(True, names[0] if names else None, tuple(protocols))
