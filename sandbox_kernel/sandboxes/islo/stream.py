"""The streams of one command: its output is Islo's exec stream, its input is pushed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from sandbox_kernel import guest_program
from sandbox_kernel.errors import ExecFailed, SandboxError
from sandbox_kernel.sandboxes.bounded_stream import BufferedStream
from sandbox_kernel.sandboxes.hosted import WhyBroken
from sandbox_kernel.sandboxes.islo.pushes import PUSH, Pusher
from sandbox_kernel.sandboxes.islo.sse import EventParser
from sandbox_kernel.untrusted_text import printable

log = logging.getLogger(__name__)

IDLE = 60.0
"""Seconds of silence after which a stream is lost; the relay sends a heartbeat every ten."""
_START_TIMEOUT = 60.0
_CLOSE_TIMEOUT = 15.0
_MAX_RECORD = 256 * 1024
_MAX_SAID = 4000

Output = AbstractAsyncContextManager[AsyncIterator[bytes]]


def relay_command(mode: str, config: Mapping[str, Any]) -> list[str]:
    """The command line that runs the relay in a sandbox."""
    program = guest_program.program("guest.commands.pushed")
    return ["python3", "-I", "-S", "-c", program, mode, json.dumps(config)]


class RecordReader:
    """The relay's records in the text of an exec stream, which may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, text: str) -> list[tuple[str, bytes]]:
        """Pairs of kind and payload. ValueError for a record that is too long."""
        *whole, self._rest = (self._rest + text.encode(errors="replace")).split(b";")
        if len(self._rest) > _MAX_RECORD:
            raise ValueError("a record without an end")
        records = filter(None, map(bytes.strip, whole))
        return [(chr(record[0]), record[1:]) for record in records]


class IsloStream(BufferedStream):
    """A running command, once ``started`` has returned. ``output`` gives the bytes of its exec
    stream when it is entered."""

    write_ahead = PUSH

    def __init__(self, output: Output, pusher: Pusher, why_broken: WhyBroken) -> None:
        super().__init__()
        self._pusher = pusher
        self._why_broken = why_broken
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._said = ""
        self._task = loop.create_task(self._take_in(output))

    async def started(self) -> None:
        """Wait until the command runs. If it does not, close the stream and raise: ExecFailed if
        the command cannot be run."""
        try:
            await asyncio.wait_for(asyncio.shield(self._started), _START_TIMEOUT)
        except BaseException:
            await asyncio.shield(self.close())
            raise

    # --- the surface

    async def write(self, data: bytes) -> None:
        if self._over.is_set():
            raise BrokenPipeError("the command has ended")
        await self._pusher.write(data)

    async def close_stdin(self) -> None:
        self._pusher.end()

    async def send_signal(self, signum: int) -> None:
        if not self._over.is_set():
            await self._pusher.urge(f"signal {int(signum)}")

    async def resize(self, rows: int, columns: int) -> None:
        if not self._over.is_set():
            await self._pusher.urge(f"resize {int(rows)} {int(columns)}")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._code is None or not self._task.done():
                await asyncio.wait_for(self._pusher.urge("kill", last=True), _CLOSE_TIMEOUT)
        except Exception as error:  # noqa: BLE001  (the sandbox may have ended, too)
            log.debug("ending a command in an Islo sandbox failed: %s", error)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._pusher.close()

    # --- output

    async def _take_in(self, output: Output) -> None:
        """Read the exec stream until the command or the stream has ended."""
        failure: BaseException | None = None
        events, records = EventParser(), RecordReader()
        try:
            async with output as pieces:
                async for piece in pieces:
                    for event in events.feed(piece):
                        if event.name == "stdout":
                            for record in records.feed(event.text):
                                await self._take(*record)
                        elif event.name in ("stderr", "error"):
                            self._said = (self._said + event.text)[-_MAX_SAID:]
        except asyncio.CancelledError:
            failure = SandboxError("the stream was closed")
        except Exception as error:  # noqa: BLE001  (the SDK may raise anything)
            failure = error
        await self._finish(failure)

    async def _take(self, kind: str, payload: bytes) -> None:
        outputs = {"o": self._out, "e": self._err}
        try:
            if kind in outputs:
                await outputs[kind].put(base64.b64decode(payload))
            elif kind.lower() in outputs:
                await outputs[kind.lower()].end()
            elif kind == "a":
                self._pusher.acknowledged(int(payload))
            elif kind == "h":
                self._pusher.missing(int(payload or b"-1"))
            elif kind == "x":
                code = int(payload)
                self._code = code if abs(code) < 2**31 else -9
                self._over.set()
            elif kind == "s" and not self._started.done():
                self._started.set_result(None)
            elif kind == "f" and not self._started.done():
                why = printable(base64.b64decode(payload).decode(errors="replace"))[:500]
                self._started.set_exception(ExecFailed(f"{why}."))
        except (ValueError, binascii.Error) as error:
            raise SandboxError(f"The relay sent an invalid record: {error}") from error

    async def _finish(self, failure: BaseException | None) -> None:
        if self._code is None and not self._closed:
            self._failure = await self._reason(failure)
        if not self._started.done():
            self._started.set_exception(self._failure or SandboxError("the stream was closed"))
            self._started.exception()  # nobody may be waiting for it
        self._over.set()
        await asyncio.gather(self._out.end(), self._err.end())
        if not self._closed:
            await self._pusher.close()

    async def _reason(self, failure: BaseException | None) -> SandboxError:
        said = printable(self._said).strip()[-500:]
        if failure is None and said and not self._started.done():
            return ExecFailed(f"{said} (commands need python3 in the image).")
        try:
            return await self._why_broken(failure)
        except SandboxError as error:  # the reason cannot be found out
            return error
