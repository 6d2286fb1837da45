"""The streams of one command: its output is Islo's exec stream, its input is pushed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from sandbox_kernel import guest_program
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.hosted import HostedStream, WhyBroken
from sandbox_kernel.sandboxes.islo.pushes import PUSH, Pusher
from sandbox_kernel.untrusted_text import printable

IDLE = 60.0
"""Seconds of silence after which a stream is lost; the relay sends a heartbeat every ten."""
MAX_EVENT = 8 * 2**20
"""Most bytes of one event, and of one line."""
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


class Event(NamedTuple):
    """One event: its name, and its data as text."""

    name: str
    data: str

    @property
    def text(self) -> str:
        """The output in a stdout or stderr event. Islo's SDK does not document its form, so plain
        text, a JSON string and a JSON object with a string are accepted."""
        found = _parsed(self.data)
        if not isinstance(found, str):
            found = _string(found, "data", "output", "text", "chunk", "message")
        return self.data if found is None else found


class EventParser:
    """Feed it bytes; it returns the complete events. ValueError for one that is too long."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._size += len(piece)
        if len(self._rest) > MAX_EVENT or (self._size > MAX_EVENT and self._data):
            raise ValueError(f"an event of more than {MAX_EVENT} bytes")
        events = []
        for raw in lines:
            line = raw.decode(errors="replace").rstrip("\r")
            if not line:
                if self._data:
                    data = "\n".join(self._data)
                    name = self._name or _string(_parsed(data), "type", "event") or ""
                    events.append(Event(name, data))
                self._name, self._data, self._size = "", [], len(self._rest)
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
        return events


def _parsed(data: str) -> object:
    """A JSON string or object; None for other text."""
    try:
        return json.loads(data) if data[:1] in ('"', "{") else None
    except ValueError:
        return None


def _string(found: object, *keys: str) -> str | None:
    """The first string that a JSON object has under one of the keys."""
    values = [found.get(key) for key in keys] if isinstance(found, dict) else []
    return next((value for value in values if isinstance(value, str)), None)


class IsloStream(HostedStream):
    """``output`` gives the bytes of the command's exec stream when it is entered."""

    write_ahead = PUSH

    def __init__(self, output: Output, pusher: Pusher, sandbox: str, why_broken: WhyBroken) -> None:
        super().__init__(sandbox, why_broken)
        self._pusher = pusher
        self._said = ""
        self._task = asyncio.get_running_loop().create_task(self._take_in(output))

    # --- the surface

    async def write(self, data: bytes) -> None:
        if self._over.is_set():
            raise BrokenPipeError("the command has ended")
        await self._pusher.write(data)

    async def close_stdin(self) -> None:
        self._pusher.end()

    async def _tell(self, order: str, *numbers: int) -> None:
        text = " ".join(map(str, (order, *numbers)))
        await self._pusher.urge(text, last=order == "kill")

    async def _hang_up(self) -> None:
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
            elif kind == "s":
                self._runs = True
                self._started.set()
            elif kind == "f":
                why = base64.b64decode(payload).decode(errors="replace")
                self._refused = f"{printable(why)[:500]}."
                self._started.set()
        except (ValueError, binascii.Error) as error:
            raise SandboxError(f"The relay sent an invalid record: {error}") from error

    async def _finish(self, failure: BaseException | None) -> None:
        said = printable(self._said).strip()[-500:]
        if failure is None and said and not self._started.is_set():
            self._refused = f"{said} (commands need python3 in the image)."
        elif self._code is None and not self._closed:
            self._failure = await self._reason(failure)
        self._started.set()
        self._over.set()
        await asyncio.gather(self._out.end(), self._err.end())
        if not self._closed:
            await self._pusher.close()
