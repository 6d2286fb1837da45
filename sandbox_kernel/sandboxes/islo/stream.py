"""The streams of one command: its output is Islo's exec stream, its input is pushed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sandbox_kernel import guest_program
from sandbox_kernel.errors import ExecFailed, SandboxError
from sandbox_kernel.sandboxes.bounded_stream import BufferedStream
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.sandboxes.islo.api import Api
from sandbox_kernel.sandboxes.islo.pushes import PUSH, Execute, Pusher
from sandbox_kernel.sandboxes.islo.sse import EventParser
from sandbox_kernel.untrusted_text import printable

log = logging.getLogger(__name__)

IDLE = 60.0
"""Seconds of silence after which a stream is lost; the relay sends a heartbeat every ten."""
_START_TIMEOUT = 60.0
_CLOSE_TIMEOUT = 15.0
_MAX_RECORD = 256 * 1024
_MAX_SAID = 4000


WhyBroken = Callable[[BaseException | None], Awaitable[SandboxError]]


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
        found = []
        for raw in whole:
            record = raw.strip()
            if record:
                found.append((chr(record[0]), record[1:]))
        return found


def relay_records(text: str) -> list[tuple[str, bytes]]:
    """The records in the complete output of a relay."""
    return RecordReader().feed(text)


class IsloStream(BufferedStream):
    """A running command. Make it with ``open``."""

    write_ahead = PUSH

    def __init__(self, folder: str, execute: Execute, why_broken: WhyBroken) -> None:
        super().__init__()
        self._pusher = Pusher(folder, execute)
        self._why_broken = why_broken
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._said = ""
        self._task: asyncio.Task[None]

    @classmethod
    async def open(
        cls,
        api: Api,
        sandbox: str,
        command: Command,
        folder: str,
        *,
        execute: Execute,
        name: str,
        why_broken: WhyBroken,
    ) -> IsloStream:
        """Start a command and wait until it runs. ExecFailed if it cannot be run."""
        stream = cls(folder, execute, why_broken)
        config = {
            "folder": folder,
            "argv": list(command.argv),
            "cwd": command.cwd,
            "tty": command.tty,
        }
        stream._task = asyncio.get_running_loop().create_task(
            stream._take_in(api, sandbox, relay_command("stream", config), command.env)
        )
        try:
            await asyncio.wait_for(asyncio.shield(stream._started), _START_TIMEOUT)
        except ExecFailed as error:
            await stream.close()
            raise ExecFailed(
                f"{command.program!r} could not be run in sandbox {name!r}: {error}"
            ) from None
        except BaseException:
            await asyncio.shield(stream.close())
            raise
        return stream

    # --- the surface

    async def write(self, data: bytes) -> None:
        if self._over.is_set():
            raise BrokenPipeError("the command has ended")
        await self._pusher.write(data)
        await self._pusher.drained()

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

    async def _take_in(
        self, api: Api, sandbox: str, command: Sequence[str], env: Mapping[str, str]
    ) -> None:
        """Read the exec stream until the command or the stream has ended."""
        failure: BaseException | None = None
        try:
            async with api.exec_stream(sandbox, command, env, idle=IDLE) as pieces:
                await self._take_pieces(pieces)
        except asyncio.CancelledError:
            failure = SandboxError("the stream was closed")
        except Exception as error:  # noqa: BLE001  (the SDK may raise anything)
            failure = error
        await self._finish(failure)

    async def _take_pieces(self, pieces: Any) -> None:
        events, records = EventParser(), RecordReader()
        async for piece in pieces:
            for event in events.feed(piece):
                if event.name == "stdout":
                    for kind, payload in records.feed(event.text):
                        await self._take(kind, payload)
                elif event.name in ("stderr", "error"):
                    self._said = (self._said + event.text)[-_MAX_SAID:]

    async def _take(self, kind: str, payload: bytes) -> None:
        try:
            if kind == "o":
                await self._out.put(base64.b64decode(payload))
            elif kind == "e":
                await self._err.put(base64.b64decode(payload))
            elif kind == "O":
                await self._out.end()
            elif kind == "E":
                await self._err.end()
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
