"""The streams of one command, over the service's exec websocket.

Binary messages carry a channel's bytes, text messages JSON: see ``execConnect`` in the service's
OpenAPI document. ``guest/commands/single.py`` runs the command itself, so its start, its end and
its signals are exact whatever the service makes of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sandbox_kernel.errors import ExecFailed
from sandbox_kernel.sandboxes import wrapped_command
from sandbox_kernel.sandboxes.hosted import HostedStream, WhyBroken
from sandbox_kernel.untrusted_text import printable

_STDIN, _STDOUT, _STDERR = b"\0", 1, 2
_PIECE = 32 * 1024
"""Bytes of stdin in one message; the service takes 64 KiB at most."""
_CLOSE_TIMEOUT = 20.0
_EARLY = 16 * 2**20
"""Output that is taken in before it is known that the command has been started."""

Tool = Callable[[str], Awaitable[int]]


class SuperserveStream(HostedStream):
    """Runs the command of a request. ``tool`` runs a short command in the same sandbox."""

    def __init__(
        self,
        socket: ClientConnection,
        request: bytes,
        tool: Tool,
        sandbox: str,
        why_broken: WhyBroken,
    ) -> None:
        super().__init__(sandbox, why_broken)
        self._socket = socket
        self._tool = tool
        self._marks = wrapped_command.Marks()
        self._process: tuple[int, str] | None = None
        self._service_code: int | None = None
        self.on_close: Callable[[], object] = lambda: None
        self._task = asyncio.get_running_loop().create_task(self._take_in(request))

    async def write(self, data: bytes) -> None:
        if self._over.is_set():
            raise BrokenPipeError("the command has ended")
        try:
            # The service takes no more when the command does not read; then it may end.
            await self._unless_over(self._send(data))
        except ConnectionClosed as error:
            raise BrokenPipeError("the connection to the command is closed") from error

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            await self._socket.send(_STDIN + bytes(view[start : start + _PIECE]))

    async def close_stdin(self) -> None:
        with contextlib.suppress(ConnectionClosed):  # the command has ended, and its stdin with it
            await self._socket.send(json.dumps({"type": "stdin_close"}))

    async def _tell(self, order: str, *numbers: int) -> None:
        if order == "kill":
            if self._code is not None:
                return
            order, numbers = "signal", (9,)
        if self._process is not None:
            await self._tool(wrapped_command.line(order, *self._process, *numbers))

    async def _hang_up(self) -> None:
        self.on_close()
        with contextlib.suppress(ConnectionClosed, asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._socket.close(), _CLOSE_TIMEOUT)

    # --- what comes

    async def _take_in(self, request: bytes) -> None:
        problem: BaseException | None = None
        finished = False
        try:
            line = wrapped_command.line("run", self._marks.mark)
            await self._socket.send(json.dumps({"command": line, "working_dir": "/"}))
            await self._send(request)
            async for message in self._socket:
                if isinstance(message, str):
                    finished = self._lifecycle(json.loads(message)) or finished
                elif message:
                    await self._output(message[0], message[1:])
        except asyncio.CancelledError:
            self._code = -9 if self._code is None else self._code
        except (ConnectionClosed, ValueError) as error:
            problem = error
        finally:
            await self._end(finished, problem)

    async def _output(self, channel: int, data: bytes) -> None:
        most = {} if self._started.is_set() else {"most": _EARLY}
        if channel == _STDOUT:
            await self._out.put(data, **most)
        elif channel == _STDERR:
            plain, words = self._marks.feed(data)
            if plain:
                await self._err.put(plain, **most)
            for word in words:
                self._mark(*word.partition(" ")[::2])

    def _mark(self, kind: str, rest: str) -> None:
        if kind == wrapped_command.STARTED and self._process is None:
            self._process = wrapped_command.process(rest)
            self._runs = self._process is not None
            self._started.set()
        elif kind == wrapped_command.FAILED:
            self._refused = printable(rest).strip()
            self._started.set()
        elif kind == wrapped_command.EXITED and self._code is None:
            self._code = wrapped_command.exit_code(rest)

    def _lifecycle(self, event: Any) -> bool:
        if not isinstance(event, dict):
            return False
        if event.get("error"):
            self._refused = printable(str(event["error"])[:500])
        code = event.get("exit_code")
        if isinstance(code, int):
            self._service_code = code
        return bool(event.get("finished") or event.get("error"))

    async def _end(self, finished: bool, problem: BaseException | None) -> None:
        try:
            if self._code is None and not finished and not self._closed:
                self._failure = await self._reason(problem)
            elif self._code is None:
                # The program that ran it was killed with it.
                self._code = 128 - (self._service_code or 137)
        finally:
            self._over.set()
            if rest := self._marks.rest():
                await self._err.put(rest, most=_EARLY)
            await asyncio.gather(self._out.end(), self._err.end())
            if not self._runs and not self._refused:
                await self._say_why()
            self._started.set()

    async def _say_why(self) -> None:
        """The command was not started, and only stderr may tell why."""
        self._refused = printable((await self._err.get())[-500:].decode("latin-1")).strip()
        if self._service_code == 127:
            python = wrapped_command.PYTHON
            self._refused += f" ({python} is needed in the sandbox; choose a template that has it)"


async def run_tool(socket: ClientConnection, line: str) -> int:
    """Run a short command; its exit code. ExecFailed if the service does not give it."""
    try:
        await socket.send(json.dumps({"command": line, "working_dir": "/"}))
        async for message in socket:
            if isinstance(message, str):
                event = json.loads(message)
                if isinstance(event, dict) and isinstance(event.get("exit_code"), int):
                    return int(event["exit_code"])
    except (ConnectionClosed, ValueError) as error:
        raise ExecFailed(f"a command's end is not known: {error}") from error
    finally:
        await socket.close()
    raise ExecFailed("a command's end is not known: the connection was closed")
