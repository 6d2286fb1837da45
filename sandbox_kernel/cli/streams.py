"""Connects a command's streams with ours; terminals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from sandbox_kernel import audit
from sandbox_kernel.cli.foreground import Interrupted, within
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle
from sandbox_kernel.sandboxes.command import Command
from sandbox_kernel.tunnel.background import aside

STDIN, STDOUT, STDERR = 0, 1, 2
_CHUNK = 65536
_LINGER = 1.0
"""Seconds without output after which the output of an ended command is complete: a process that it
left behind may hold its stdout open forever."""


class AttachedCommand:
    """One command in a sandbox that uses this process's standard streams.

    ``on_signal`` is for ``foreground.run``: the first Ctrl-C goes to the command, a second one ends
    it. With ``interrupt_grace`` the command also ends if it is still running that many seconds
    after the first one.
    """

    def __init__(self, *, interrupt_grace: float | None = None) -> None:
        self._interrupt_grace = interrupt_grace
        self._stream: ExecStream | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._beside: list[asyncio.Task[None]] = []
        """Tasks that need not end before the command is over."""
        self._interrupted = False
        self._ended = False
        self._reading: dict[int, asyncio.Timeout] = {}
        """Time limits of the reads in progress."""

    async def exec(
        self, handle: SandboxHandle, command: Command, *, timeout: float | None = None
    ) -> int:
        """Run a command to its end; gives its exit code (128+N for signal N)."""
        audit.note_command(handle, command.argv)
        self._stream = stream = await handle.open_command(command)
        problem = (
            f"{command.program!r} in sandbox {handle.name!r} did not end within {timeout or 0:g} s "
            f"and was killed. Give a longer --timeout if it needs one."
        )
        try:
            async with within(timeout, problem):
                code = await self._carry(stream, terminal=command.tty is not None)
        finally:
            self._stream = None
            await stream.close()
        return code if code >= 0 else 128 - code

    def on_signal(self, signum: int) -> bool:
        """Called on the background loop. False: end the command."""
        if self._stream is None or self._tasks is None:
            return signum == signal.SIGWINCH
        if signum == signal.SIGWINCH:
            self._begin(_tolerant(self._stream.resize(*terminal_size())))
            return True
        if signum != signal.SIGINT or self._interrupted:
            return False
        self._interrupted = True
        self._begin(_tolerant(self._stream.send_signal(signal.SIGINT)))
        if self._interrupt_grace is not None:
            self._begin(_end_after(self._interrupt_grace))
        return True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._beside.append(self._tasks.create_task(work))

    async def _carry(self, stream: ExecStream, *, terminal: bool) -> int:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._begin(_feed(stream, terminal=terminal))
                copying = [
                    self._tasks.create_task(self._copy(stream.read, STDOUT)),
                    self._tasks.create_task(self._copy(stream.read_stderr, STDERR)),
                ]
                code = await stream.wait()
                self._ended = True
                for limit in self._reading.values():
                    limit.reschedule(loop.time() + _LINGER)
                await asyncio.wait(copying)
                for task in self._beside:
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # such as BrokenPipeError of our own stdout
        finally:
            self._tasks = None
        return code

    async def _copy(self, read: Callable[[], Awaitable[bytes]], fd: int) -> None:
        while True:
            limit = self._reading[fd] = asyncio.timeout(_LINGER if self._ended else None)
            try:
                async with limit:
                    data = await read()
            except TimeoutError:
                if limit.expired():
                    return
                raise
            finally:
                del self._reading[fd]
            if not data:
                return
            await aside(_write, fd, data)


async def _end_after(seconds: float) -> None:
    """End the command, which did not heed the first Ctrl-C."""
    await asyncio.sleep(seconds)
    raise Interrupted(signal.SIGINT)


async def _tolerant(doing: Awaitable[None]) -> None:
    # The command may have ended; whoever waits for it reports that.
    with contextlib.suppress(SandboxError, OSError):
        await doing


async def _feed(stream: ExecStream, *, terminal: bool) -> None:
    """Our stdin to the command's, unless it is a terminal that the command does not have."""
    # The command may end without reading its input.
    with contextlib.suppress(SandboxError, OSError):
        if sys.stdin is not None and (terminal or not os.isatty(STDIN)):
            while data := await aside(_read, STDIN):
                await stream.write(data)
        await stream.close_stdin()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except OSError:
        return b""  # the terminal was closed


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def terminal_size() -> tuple[int, int]:
    """Rows and columns of the terminal that we write to."""
    try:
        size = os.get_terminal_size(STDOUT)
    except OSError:
        return 24, 80
    return max(1, size.lines), max(1, size.columns)


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Pass every key on, also Ctrl-C, while the block runs. Always restores the terminal."""
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)  # keeps what was typed ahead
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
