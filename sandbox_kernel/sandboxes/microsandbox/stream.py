"""The streams of one command in a VM.

The SDK gives one sequence of events for stdout, stderr and the end. A task of the stream's own
takes them in as long as there is room for what was not read yet; then it waits, the SDK's own
channel fills, and the command is pushed back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.bounded_stream import BufferedStream

_PIECE = 64 * 1024
_CLOSE_TIMEOUT = 10.0
_KILLED_BY_SIGNAL = -1


class MicrosandboxStream(BufferedStream):
    """A running command. The handle has seen that it was started."""

    def __init__(
        self,
        handle: Any,
        pid: int,
        signal_of: Callable[[int], Awaitable[int | None]],
        why_broken: Callable[[], Awaitable[SandboxError]],
    ) -> None:
        super().__init__()
        self._handle = handle
        self._stdin = handle.take_stdin()
        self._pid = pid
        self._signal_of = signal_of
        self._why_broken = why_broken
        self._sent: int | None = None
        self._task = asyncio.get_running_loop().create_task(self._take_in())

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            # The SDK does not tell a writer that the command has ended.
            writing = self._stdin.write(bytes(view[start : start + _PIECE]))
            try:
                await self._unless_over(writing)
            except BrokenPipeError:
                raise
            except Exception as error:
                raise BrokenPipeError(f"the command takes no input: {error}") from error

    async def close_stdin(self) -> None:
        with contextlib.suppress(Exception):  # the command has ended, and its stdin with it
            await self._stdin.close()

    async def send_signal(self, signum: int) -> None:
        if not self._over.is_set():
            self._sent = int(signum)
            with contextlib.suppress(Exception):  # it has ended meanwhile
                await self._handle.signal(int(signum))

    async def resize(self, rows: int, columns: int) -> None:
        if not self._closed:
            await self._handle.resize(rows, columns)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._over.is_set():
            # It may have ended, or its sandbox: then there is nothing to kill.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._handle.kill(), _CLOSE_TIMEOUT)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._handle = self._stdin = None  # dropped, the SDK forgets the command

    async def _take_in(self) -> None:
        """Take in the command's events until it has ended, or the connection to it."""
        code: int | None = None
        try:
            while code is None and (event := await self._handle.recv()) is not None:
                kind = str(event.event_type)
                if kind == "stdout":
                    await self._out.put(bytes(event.data))
                elif kind == "stderr":
                    await self._err.put(bytes(event.data))
                elif kind == "exited":
                    code = int(event.code)
            if code is None:
                self._failure = await self._why_broken()
            elif code == _KILLED_BY_SIGNAL:
                code = -(await self._signal_of(self._pid) or self._sent or 9)
        except asyncio.CancelledError:
            code = -9 if code is None else code
        except Exception as error:  # noqa: BLE001  (the SDK may raise anything)
            self._failure = await self._why_broken()
            self._failure.__cause__ = error
        finally:
            self._code = code
            self._over.set()
            await asyncio.gather(self._out.end(), self._err.end())
