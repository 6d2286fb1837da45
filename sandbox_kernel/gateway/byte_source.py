"""Reads a connection through parsers that do no I/O themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from sandbox_kernel.gateway.refusals import PeerClosed, Refusal

T = TypeVar("T")
Parser = Callable[[bytearray], "T | None"]
"""Takes what it needs from the front of a buffer; None: there is not enough yet. It must refuse
what can never become valid, so that the buffer is bounded."""

READ_SIZE = 256 * 1024
_MOST_LOOKED_AT = 16 << 20
"""Bytes that parsers may look at until they have found one thing. They begin anew with each piece,
so many small pieces would cost this process much, and who sends them nothing."""


class Reader(Protocol):
    """What is used of asyncio.StreamReader."""

    async def read(self, n: int = -1) -> bytes: ...


class ByteSource:
    """What a peer sends: bytes that were read too far come first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.buffer = bytearray()

    async def take(self, parse: Parser[T], *, seconds: float | None = None) -> T:
        """What the parser makes of the next bytes. PeerClosed if they end before that, Refusal 408
        if they take longer than ``seconds``, 400 if they come in too many pieces."""
        looked_at = 0
        try:
            async with asyncio.timeout(seconds):
                while (found := parse(self.buffer)) is None:
                    looked_at += len(self.buffer)
                    if looked_at > _MOST_LOOKED_AT:
                        raise Refusal(400, "bad HTTP or TLS: it came in too many small pieces")
                    self.buffer += await self._read()
        except TimeoutError:
            raise Refusal(408, f"the request was not complete within {seconds} s") from None
        return found

    async def wait(self, *, seconds: float | None = None) -> bool:
        """Wait until there is something to read. False: the peer has closed, or was idle."""
        try:
            async with asyncio.timeout(seconds):
                if not self.buffer:
                    self.buffer += await self._read()
        except (TimeoutError, PeerClosed):
            return False
        return True

    async def some(self, most: int = READ_SIZE) -> bytes:
        """Some bytes, at most this many; b"" when the peer has closed its side."""
        if not self.buffer:
            return await self._reader.read(most)
        piece = bytes(self.buffer[:most])
        del self.buffer[:most]
        return piece

    async def _read(self) -> bytes:
        data = await self._reader.read(READ_SIZE)
        if not data:
            raise PeerClosed("the connection was closed")
        return data
