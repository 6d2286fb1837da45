"""A command's streams to ours, and terminals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from sandbox_kernel.cli.foreground import Interrupted, in_thread
from sandbox_kernel.errors import SandboxError, SandboxTimeout
from sandbox_kernel.sandboxes.base import ExecStream, SandboxHandle

STDIN, STDOUT, STDERR = 0, 1, 2
_CHUNK = 65536
_LINGER = 1.0
"""Seconds without output after which a command that has ended is taken to have no more of it: a
process that it left behind may hold its stdout open for ever."""


class Session:
    """One command in a sandbox, with this process's standard streams as its own.

    ``on_signal`` is for ``foreground.run``: Ctrl-C goes to the command, a second one ends it.
    With ``interrupt_grace``, the command is ended if it has not heeded the first one after so
    many seconds.
    """

    def __init__(self, *, interrupt_grace: float | None = None) -> None:
        self._interrupt_grace = interrupt_grace
        self._stream: ExecStream | None = None
        self._interrupted = False
        self._unheeded = False
        self._patience: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[Any] | None = None

    async def exec(
        self,
        handle: SandboxHandle,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        terminal: bool = False,
    ) -> int:
        """Run a command to its end; gives its exit code (128+N for signal N)."""
        size = terminal_size() if terminal else None
        self._stream = stream = await handle.open_stream(argv, env=env, cwd=cwd, tty=size)
        self._main = asyncio.current_task()
        try:
            code = await asyncio.wait_for(self._carry(stream, terminal=terminal), timeout)
        except asyncio.CancelledError:
            if self._unheeded:
                raise Interrupted(signal.SIGINT) from None
            raise
        except SandboxTimeout:
            raise  # not our timeout
        except asyncio.TimeoutError:
            raise SandboxTimeout(
                f"{argv[0]!r} in sandbox {handle.name!r} did not end within {timeout:g} s and was "
                f"killed. Give a longer --timeout if it needs one."
            ) from None
        finally:
            self._stream = None
            if self._patience is not None:
                self._patience.cancel()
            await stream.close()
        return code if code >= 0 else 128 - code

    def on_signal(self, signum: int) -> bool:
        """Called on the background loop. False: end the command."""
        if signum == signal.SIGWINCH:
            if self._stream is not None:
                self._start(self._stream.resize(*terminal_size()))
            return True
        if signum != signal.SIGINT or self._stream is None or self._interrupted:
            return False
        self._interrupted = True
        self._start(self._stream.send_signal(signal.SIGINT))
        if self._interrupt_grace is not None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._interrupt_grace, self._end_unheeded)
        return True

    def _end_unheeded(self) -> None:
        if self._main is not None:
            self._unheeded = True
            self._main.cancel()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def tolerant() -> None:
            # The command may be gone by now; whoever waits for it says so.
            with contextlib.suppress(SandboxError, OSError):
                await coroutine

        task = asyncio.get_running_loop().create_task(tolerant())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _carry(self, stream: ExecStream, *, terminal: bool) -> int:
        ended = asyncio.Event()
        feeding = asyncio.ensure_future(_feed(stream, terminal=terminal))
        copying = asyncio.gather(
            _copy(stream.read, STDOUT, ended), _copy(stream.read_stderr, STDERR, ended)
        )
        waiting = asyncio.ensure_future(stream.wait())
        try:
            either: set[asyncio.Future[Any]] = {waiting, copying}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if copying.done():
                copying.result()  # our own stdout may be broken, and then nobody waits
            code = await waiting
            ended.set()
            await copying
            return code
        finally:
            for task in (feeding, copying, waiting):
                task.cancel()
            await asyncio.gather(feeding, copying, waiting, return_exceptions=True)


async def _feed(stream: ExecStream, *, terminal: bool) -> None:
    """Our stdin to the command's, unless it is a terminal that the command does not have."""
    # The command may end without reading its input; that is its right.
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        if sys.stdin is not None and (terminal or not os.isatty(STDIN)):
            while data := await in_thread(_read, STDIN):
                await stream.write(data)
        await stream.close_stdin()


async def _copy(read: Callable[[], Awaitable[bytes]], fd: int, ended: asyncio.Event) -> None:
    over = asyncio.ensure_future(ended.wait())
    reading: asyncio.Future[bytes] | None = None
    try:
        while True:
            reading = asyncio.ensure_future(read())
            await asyncio.wait({reading, over}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=_LINGER)
            if not reading.done() or not (data := reading.result()):
                return
            await in_thread(_write, fd, data)
    finally:
        over.cancel()
        if reading is not None:
            reading.cancel()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except OSError:
        return b""  # a terminal that has hung up


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
    """Pass every key on, also Ctrl-C, for as long as this lasts. Restores the terminal always."""
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
