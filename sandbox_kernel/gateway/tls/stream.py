"""TLS over another connection, as reader and writer of a Wire."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from sandbox_kernel.gateway.byte_source import ByteSource
from sandbox_kernel.gateway.relay import Transport, Wire

_PIECE = 256 * 1024


class TlsStream:
    """One side of TLS. It reads from the connection below only when it is read itself, so nothing
    piles up. Without ``strict_end``, a connection that ends without TLS's own end is taken for an
    orderly end: for clients, whose requests have lengths."""

    def __init__(
        self,
        below: Wire,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_hostname: str | None = None,
        strict_end: bool = True,
    ) -> None:
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._strict_end = strict_end
        self._ended = False
        self._closing = False

    @property
    def wire(self) -> Wire:
        return Wire(ByteSource(self), self).at(self._below.address)

    @property
    def protocol(self) -> str | None:
        """What both sides have agreed on (ALPN)."""
        return self._tls.selected_alpn_protocol()

    async def handshake(self, seconds: float) -> None:
        """ssl.SSLError, and other OSError: TimeoutError after so many seconds."""
        async with asyncio.timeout(seconds):
            try:
                while not self._is_agreed():
                    await self._more()
            finally:
                self._flush()  # also an alert that says why not
            await self._below.writer.drain()

    def _is_agreed(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    # --- reading

    async def read(self, n: int = -1) -> bytes:
        most = n if n >= 0 else _PIECE
        while True:
            try:
                if (data := self._decrypted(most)) is not None:
                    return data
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLEOFError:
                if self._strict_end:
                    raise
                return b""
            await self._more()

    def _decrypted(self, most: int) -> bytes | None:
        """What is there, at most so much; None: nothing yet; b"": the end."""
        pieces: list[bytes] = []
        size = 0
        while size < most:
            try:
                piece = self._tls.read(min(most - size, _PIECE))
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:
                if pieces:
                    break  # the next call says it again
                raise
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces) if pieces else None

    async def _more(self) -> None:
        if self._outgoing.pending:
            self._flush()
            await self._below.writer.drain()
        if data := await self._below.source.some():
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    # --- writing, as of asyncio.StreamWriter

    @property
    def transport(self) -> Transport:
        return self._below.writer.transport

    def write(self, data: bytes) -> None:
        if self._ended:
            raise ConnectionResetError("this side of TLS has ended")
        left = memoryview(data)
        while left:
            try:
                left = left[self._tls.write(left) :]
            except ssl.SSLWantReadError:
                raise ConnectionResetError("the other side negotiates again") from None
        self._flush()

    async def drain(self) -> None:
        await self._below.writer.drain()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Tell the other side that nothing more comes. It may go on sending."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ssl.SSLError, ValueError):
                self._tls.unwrap()
            self._flush()

    def is_closing(self) -> bool:
        return self._closing or self._below.writer.is_closing()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._below.writer.is_closing():
                self.write_eof()
            self._below.writer.close()

    async def wait_closed(self) -> None:
        await self._below.writer.wait_closed()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.writer.get_extra_info(name, default)

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._below.writer.write(self._outgoing.read())
