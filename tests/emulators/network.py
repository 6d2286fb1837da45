"""What lies between an SDK and a service: a proxy for the service's own names, and delay.

An SDK that insists on the real host name and on TLS is sent here by ``HTTPS_PROXY``: the proxy
takes ``CONNECT name:443`` for any name and joins it to the emulator's own TLS port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

_PIECE = 256 * 1024
_MOST = 16 * 2**20


class Gateway:
    """Listens on a port of its own. ``delay`` is added to every round trip, half each way, and
    does not limit how much is under way."""

    def __init__(self, port: int, *, delay: float = 0.0, proxy: bool = False) -> None:
        self._port = port
        self._delay = delay / 2
        self._proxy = proxy
        self._server: asyncio.Server

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._proxy:
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"CONNECT "):
                    writer.write(b"HTTP/1.1 405 Only CONNECT\r\nContent-Length: 0\r\n\r\n")
                    return
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two has gone
        except asyncio.CancelledError:
            pass  # the emulator ends
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._delay:
                await _carry_late(reader, writer, self._delay)
            else:
                while data := await reader.read(_PIECE):
                    writer.write(data)
                    await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except OSError:
            writer.transport.abort()


async def _carry_late(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float
) -> None:
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[float, bytes]] = deque()
    size = 0
    changed = asyncio.Event()

    async def send() -> None:
        nonlocal size
        while True:
            while not waiting:
                changed.clear()
                await changed.wait()
            due, data = waiting.popleft()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                return
            writer.write(data)
            await writer.drain()
            size -= len(data)
            changed.set()

    sending = asyncio.ensure_future(send())
    try:
        while True:
            data = await reader.read(_PIECE)
            waiting.append((loop.time() + delay, data))
            size += len(data)
            changed.set()
            if not data:
                break
            while size > _MOST and not sending.done():
                await asyncio.sleep(delay / 4)
        await sending
    finally:
        sending.cancel()
