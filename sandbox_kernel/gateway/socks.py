"""SOCKS5 (RFC 1928), the part that a client of a gateway needs: no authentication, CONNECT, names
and addresses. Parsers for ByteSource; no I/O."""

from __future__ import annotations

import ipaddress
from enum import IntEnum

from sandbox_kernel.gateway.names import Target, read_target
from sandbox_kernel.gateway.refusals import Refusal

VERSION = 5
NO_AUTHENTICATION = bytes((VERSION, 0))
NO_METHOD = bytes((VERSION, 0xFF))
SOCKS4_REJECTED = bytes((0, 0x5B, 0, 0, 0, 0, 0, 0))
_CONNECT = 1
_ADDRESS_V4, _NAME, _ADDRESS_V6 = 1, 3, 4


class Reply(IntEnum):
    SUCCEEDED = 0
    FAILED = 1
    NOT_ALLOWED = 2
    HOST_UNREACHABLE = 4
    TIMED_OUT = 6
    COMMAND_NOT_SUPPORTED = 7
    ADDRESS_NOT_SUPPORTED = 8


class SocksRefused(Refusal):
    """The request is not one that is served; ``reply`` is the answer."""

    def __init__(self, reply: Reply, why: str) -> None:
        super().__init__(400, f"bad SOCKS request: {why}")
        self.reply = reply


def take_greeting(buffer: bytearray) -> bool | None:
    """Whether the client would do without authentication."""
    if len(buffer) < 2 or len(buffer) < 2 + buffer[1]:
        return None
    methods = bytes(buffer[2 : 2 + buffer[1]])
    del buffer[: 2 + buffer[1]]
    return 0 in methods


def take_request(buffer: bytearray) -> Target | None:
    """Where the client wants to go. SocksRefused; NameRefused."""
    if len(buffer) < 5:
        return None
    version, command, reserved, kind, first = buffer[:5]
    if version != VERSION or reserved != 0:
        raise SocksRefused(Reply.FAILED, "it is not SOCKS5")
    if kind not in (_ADDRESS_V4, _NAME, _ADDRESS_V6):
        raise SocksRefused(Reply.ADDRESS_NOT_SUPPORTED, "the kind of address is unknown")
    if command != _CONNECT:
        raise SocksRefused(Reply.COMMAND_NOT_SUPPORTED, "only CONNECT is served")
    start = 5 if kind == _NAME else 4
    size = {_ADDRESS_V4: 4, _NAME: first, _ADDRESS_V6: 16}[kind]
    end = start + size
    if len(buffer) < end + 2:
        return None
    host, port = bytes(buffer[start:end]), int.from_bytes(buffer[end : end + 2], "big")
    del buffer[: end + 2]
    return read_target(host if kind == _NAME else str(ipaddress.ip_address(host)), port)


def reply(code: Reply) -> bytes:
    """The answer to a request. Where we are connected from is nobody's business."""
    return bytes((VERSION, code, 0, _ADDRESS_V4, 0, 0, 0, 0, 0, 0))


def reply_to(refusal: Refusal) -> bytes:
    """The answer that comes closest to an HTTP status."""
    if isinstance(refusal, SocksRefused):
        return reply(refusal.reply)
    if refusal.is_denial or refusal.status == 400:
        return reply(Reply.NOT_ALLOWED)
    by_status = {502: Reply.HOST_UNREACHABLE, 504: Reply.TIMED_OUT}
    return reply(by_status.get(refusal.status, Reply.FAILED))
