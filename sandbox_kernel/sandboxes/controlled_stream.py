"""A command's stream where a program of ours runs the command: process 1 of the sandbox
(``guest/commands/process_one.py``), or the broker.

The bytes go through *stream ends*, one for each stream; signals and the exit code through the
connection of the request that started the command, its *control*.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sandbox_kernel.errors import ExecFailed, SandboxError
from sandbox_kernel.guest.commands.start import END_OF_INPUT
from sandbox_kernel.sandboxes.base import Command, ExecStream
from sandbox_kernel.sandboxes.channel import Hangup
from sandbox_kernel.untrusted_text import printable

START_TIMEOUT = 30.0
_CLOSE_TIMEOUT = 20.0


class Control(Protocol):
    """The connection of one request: a Channel, or a stream of the wire."""

    async def receive(self) -> dict[str, Any]:
        """The next message; Hangup if there will be none."""

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message after the request. Hangup if nobody will read it."""

    def hang_up(self) -> None:
        """End the command; the last messages can still be received."""

    def close(self) -> None: ...


class StreamEnd(Protocol):
    """The host's end of one stream; one reader and one writer at a time."""

    async def read(self) -> bytes:
        """The next piece; empty at the end, also if this end is closed meanwhile."""

    async def write(self, data: bytes) -> None:
        """All of it. BrokenPipeError if nobody will read it."""

    def end_input(self) -> None: ...

    def close(self) -> None: ...


class ControlledStream(ExecStream):
    """A running command. ``gone`` gives the error for a sandbox that has ended.

    ``ports`` are the ends of stdin, stdout and stderr; or one for stdin and stdout, and one for
    stderr if it is not a terminal's.
    """

    def __init__(
        self,
        control: Control,
        gone: Callable[[], SandboxError],
        ports: Sequence[StreamEnd],
        *,
        terminal: bool,
        sock: socket.socket | None = None,
    ) -> None:
        self._control = control
        self._gone = gone
        self._ports = ports
        self._stdin = ports[0]
        self._stdout = ports[-2] if len(ports) > 1 else ports[0]
        self._stderr = ports[-1] if len(ports) > 1 else None
        self._terminal = terminal
        self._exit: int | None = None
        self._failure: SandboxError | None = None
        self._ended = False
        self._waiting = asyncio.Lock()
        self._closed = False
        self.socket = sock

    async def read(self) -> bytes:
        return await self._stdout.read()

    async def read_stderr(self) -> bytes:
        return await self._stderr.read() if self._stderr else b""

    async def write(self, data: bytes) -> None:
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        if self._terminal:
            await self._stdin.write(END_OF_INPUT)
        else:
            self._stdin.end_input()

    async def wait(self) -> int:
        await self._wait_for_end()
        if self._exit is None:
            raise self._failure or self._gone()
        return self._exit

    async def _wait_for_end(self) -> None:
        async with self._waiting:
            while not self._ended:
                try:
                    self._take(await self._control.receive())
                except Hangup:
                    self._ended = True

    def _take(self, message: dict[str, Any]) -> None:
        code = message.get("exit")
        if isinstance(code, int):
            self._exit, self._ended = code if abs(code) < 2**31 else -1, True

    async def send_signal(self, signum: int) -> None:
        await self._tell({"signal": int(signum)})

    async def resize(self, rows: int, columns: int) -> None:
        if self._terminal:
            await self._tell({"resize": [rows, columns]})

    async def _tell(self, message: dict[str, Any]) -> None:
        if not self._ended and not self._closed:
            with contextlib.suppress(Hangup):
                await self._control.send(message)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._control.hang_up()
        for port in self._ports:
            port.close()
        try:
            # The far side kills what does not end on its own, so this limit is for a stuck one.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wait_for_end(), _CLOSE_TIMEOUT)
        finally:
            self._ended = True
            self._control.close()


def check_started(answer: dict[str, Any], command: Command, sandbox: str) -> None:
    """ExecFailed unless the answer to an exec or spawn says that the command runs."""
    if not isinstance(answer.get("pid"), int):
        why = printable(str(answer.get("message", answer))[:500])
        raise ExecFailed(f"{command.program!r} could not be run in sandbox {sandbox!r}: {why}.")
