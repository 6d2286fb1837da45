"""The streams of a command in the local jail.

The command has the far ends of pipes (or of a socket, or a terminal) that the host made, so its
bytes go straight to the kernel of the host and back: no copying process is in between, and a full
pipe pushes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import ExecFailed, SandboxGone
from sandbox_kernel.guest.jailinit import HANGUP_GRACE
from sandbox_kernel.sandboxes.base import ExecStream
from sandbox_kernel.sandboxes.local.control import Control, Hangup
from sandbox_kernel.sandboxes.port import Port

START_TIMEOUT = 30.0
_SOCKET_BUFFER = 2**20
_CLOSE_TIMEOUT = HANGUP_GRACE + 5.0
_END_OF_INPUT = b"\x04"


class LocalStream(ExecStream):
    """A command in a jail. Made by ``open_stream``."""

    def __init__(
        self,
        control: Control,
        why_gone: Callable[[], str],
        *,
        stdin: Port | None,
        stdout: Port,
        stderr: Port | None,
        terminal: bool,
        sock: socket.socket | None,
    ) -> None:
        self._control = control
        self._why_gone = why_gone
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self._terminal = terminal
        self._exit: int | None = None
        self._ended = False
        self._waiting = asyncio.Lock()
        self._closed = False
        self.socket = sock

    async def read(self) -> bytes:
        return await self._stdout.read()

    async def read_stderr(self) -> bytes:
        return await self._stderr.read() if self._stderr else b""

    async def write(self, data: bytes) -> None:
        await (self._stdin or self._stdout).write(data)

    async def close_stdin(self) -> None:
        if self._terminal:
            await self._stdout.write(_END_OF_INPUT)
        else:
            (self._stdin or self._stdout).end_input()

    async def wait(self) -> int:
        await self._wait_for_end()
        if self._exit is None:
            raise SandboxGone(self._why_gone())
        return self._exit

    async def _wait_for_end(self) -> None:
        async with self._waiting:
            while not self._ended:
                try:
                    answer = await self._control.answer()
                except Hangup:
                    self._ended = True
                    return
                if isinstance(answer.get("exit"), int):
                    self._exit, self._ended = answer["exit"], True

    async def send_signal(self, signum: int) -> None:
        if not self._ended and not self._closed:
            self._control.send(signal=int(signum))

    async def resize(self, rows: int, columns: int) -> None:
        if self._terminal and not self._stdout.closed:
            self._stdout.resize(rows, columns)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._control.hang_up()
        for port in (self._stdin, self._stdout, self._stderr):
            if port is not None:
                port.close()
        try:
            # jailinit kills what does not end by itself, so this limit is for a stuck host.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wait_for_end(), _CLOSE_TIMEOUT)
        finally:
            self._ended = True
            self._control.close()


async def open_stream(
    runtime: Path,
    command: Mapping[str, Any],
    *,
    sandbox: str,
    env: Mapping[str, str],
    cwd: str,
    tty: tuple[int, int] | None,
    duplex: bool,
    why_gone: Callable[[], str],
) -> LocalStream:
    """Start a command. ExecFailed if that cannot be done, SandboxGone if the jail has ended."""
    message: dict[str, Any] = {"kind": "exec", **command, "env": dict(env), "cwd": cwd}
    if tty is not None:
        message["tty"] = list(tty)
    with _ends(duplex=duplex, tty=tty is not None) as (theirs, ours):
        try:
            control, answer = await Control.request(runtime, message, theirs, timeout=START_TIMEOUT)
        except Hangup:
            raise SandboxGone(why_gone()) from None
        try:
            check_started(answer, command["argv"], sandbox)
            if tty is not None:
                ours.append(_take_terminal(control, sandbox))
            ports = [Port(end) for end in ours]
        except BaseException:
            control.close()
            raise
        sock = next((end for end in ours if isinstance(end, socket.socket)), None)
        ours.clear()
    stdin, stdout, stderr = ports if len(ports) == 3 else (None, ports[0], None)
    return LocalStream(
        control,
        why_gone,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        terminal=tty is not None,
        sock=sock,
    )


def check_started(answer: dict[str, Any], argv: Sequence[str], sandbox: str) -> None:
    """ExecFailed unless the answer to an exec or spawn says that the command runs."""
    if not isinstance(answer.get("pid"), int):
        why = str(answer.get("message", answer))[:500]
        raise ExecFailed(f"{argv[0]!r} could not be run in sandbox {sandbox!r}: {why}.")


def _take_terminal(control: Control, sandbox: str) -> int:
    if len(control.fds) != 1 or not os.isatty(control.fds[0]):
        raise ExecFailed(f"Sandbox {sandbox!r} did not give its terminal to the host.")
    return control.fds.pop()


@contextlib.contextmanager
def _ends(*, duplex: bool, tty: bool) -> Iterator[tuple[list[int], list[int | socket.socket]]]:
    """The command's ends of its streams, and ours. Its ends are closed here in any case; ours
    are closed unless the caller takes them out of the list."""
    theirs: list[int] = []
    ours: list[int | socket.socket] = []
    try:
        if tty:
            pass  # the terminal is made in the jail
        elif duplex:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.append(near)
            theirs.append(far.detach())
            theirs.append(os.dup(theirs[0]))
            near.setblocking(False)
            _enlarge(near, theirs[0])
        else:
            for number in range(3):
                read, write = os.pipe()
                ours.append(write if number == 0 else read)
                theirs.append(read if number == 0 else write)
        yield theirs, ours
    finally:
        for end in [*theirs, *ours]:
            end.close() if isinstance(end, socket.socket) else os.close(end)


def _enlarge(near: socket.socket, far: int) -> None:
    with socket.socket(fileno=os.dup(far)) as other:
        for end in (near, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
