"""Ways to end a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from sandbox_kernel.gateway.relay import Wire, Writer

_LINGER = 2.0
_MOST_DISCARDED = 1 << 20
_UNREAD = 600.0
"""Seconds that a peer may take to read what was sent to it."""


async def close(writer: Writer, seconds: float = _UNREAD) -> None:
    """Send what is still to be sent, and close; reset if the peer does not take it. Raises
    nothing."""
    try:
        async with asyncio.timeout(seconds):
            writer.close()
            await writer.wait_closed()
    except (OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
        reset(writer)


async def close_after_answer(wire: Wire) -> None:
    """Close so that the client can read the answer: a close with unread input would be a reset,
    which discards the answer at the client, too."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_LINGER):
            await wire.writer.drain()
            if wire.writer.can_write_eof():
                wire.writer.write_eof()
                discarded = 0
                while discarded < _MOST_DISCARDED and (data := await wire.source.some()):
                    discarded += len(data)
    await close(wire.writer)


def reset(writer: Writer) -> None:
    """End a connection at once: a client sees a reset, not an orderly end, which could be taken for
    the end of what it is reading."""
    found = writer.get_extra_info("socket")
    if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
