"""Bodies of HTTP/1 messages: read strictly, and framed anew."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from sandbox_kernel.gateway.byte_source import READ_SIZE, ByteSource
from sandbox_kernel.gateway.http_head import Body
from sandbox_kernel.gateway.refusals import PeerClosed, Refusal

END_OF_CHUNKS = b"0\r\n\r\n"
_MOST_LINE = 1024
_MOST_TRAILERS = 16 * 1024
_MOST_TRAILER_LINES = 100
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class BadBody(Refusal):
    """A body's framing is broken."""

    def __init__(self, why: str) -> None:
        super().__init__(400, f"bad HTTP: {why}")


async def pieces_of(source: ByteSource, body: Body) -> AsyncIterator[bytes]:
    """The content of a body, in pieces that are as large as they arrive. PeerClosed if it is cut
    short; BadBody."""
    if body.chunked:
        while size := await source.take(take_chunk_size):
            async for piece in _exactly(source, size):
                yield piece
            await source.take(take_line_end)
        await source.take(take_trailers)
    elif body.length is not None:
        async for piece in _exactly(source, body.length):
            yield piece
    else:
        while piece := await source.some():
            yield piece


async def _exactly(source: ByteSource, left: int) -> AsyncIterator[bytes]:
    while left:
        piece = await source.some(min(left, READ_SIZE))
        if not piece:
            raise PeerClosed("a body was cut short")
        left -= len(piece)
        yield piece


def chunk(piece: bytes) -> bytes:
    """A piece of content as a chunk."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def take_chunk_size(buffer: bytearray) -> int | None:
    """Parser of the line before a chunk. Extensions are dropped."""
    line = _take_line(buffer, _MOST_LINE)
    if line is None:
        return None
    found = _SIZE.fullmatch(line)
    if found is None:
        raise BadBody("the size of a chunk is not a number")
    return int(found[1], 16)


def take_line_end(buffer: bytearray) -> bool | None:
    """Parser of the line end after a chunk."""
    if not b"\r\n".startswith(buffer[:2]):
        raise BadBody("a chunk is longer than its size")
    if len(buffer) < 2:
        return None
    del buffer[:2]
    return True


def take_trailers(buffer: bytearray) -> bool | None:
    """Parser of what follows the last chunk. Trailers are dropped."""
    end = 0
    for _ in range(_MOST_TRAILER_LINES + 1):
        at = buffer.find(b"\n", end, _MOST_TRAILERS)
        if at < 0:
            if len(buffer) >= _MOST_TRAILERS:
                raise BadBody("too many trailers")
            return None
        line = bytes(buffer[end : at + 1])
        end = at + 1
        if line == b"\r\n":
            del buffer[:end]
            return True
        if not line.endswith(b"\r\n") or not _TRAILER.fullmatch(line[:-2]):
            raise BadBody("a trailer is not NAME: VALUE")
    raise BadBody("too many trailers")


def _take_line(buffer: bytearray, most: int) -> bytes | None:
    at = buffer.find(b"\n", 0, most)
    if at < 0:
        if len(buffer) >= most:
            raise BadBody("a line is too long")
        return None
    line = bytes(buffer[: at + 1])
    if not line.endswith(b"\r\n"):
        raise BadBody("a line does not end with CR LF")
    del buffer[: at + 1]
    return line[:-2]
