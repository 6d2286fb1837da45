"""Commands that run on between two calls of the model: the SDK's PTY interface over ExecStreams.

The output of one update is bounded: beyond that, the command waits until the model asks again.
Streams, and the tasks that read them, belong to the background loop: the caller's may change
between two calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agents.sandbox.errors import PtySessionNotFoundError
from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
)

from sandbox_kernel.agents.raw_exec import end
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandboxes.base import ExecStream
from sandbox_kernel.sandboxes.polling import attempts
from sandbox_kernel.tunnel.background import run

SIZE = (24, 80)
"""Rows and columns."""
_MOST = 4 * 2**20
"""Bytes for one update."""
_PAUSE = 0.1
"""Seconds: how often a command that must wait looks whether it may go on, and how long a program
has to answer input before its output is collected (the SDK's own)."""


_PATIENCE = 2.0
"""Seconds for the first output after a start or after input to begin its way, on top of the time in
which the rest is collected: that time is as short as 0.25 s, and a service may be far away."""


@dataclass
class _Terminal:
    """One command. Its methods run on the background loop."""

    stream: ExecStream
    tty: bool
    chunks: deque[bytes] = field(default_factory=deque)
    """What nobody has collected yet. The caller's loop takes from it meanwhile."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    room: int = 0
    """How many bytes may still come, until the next update is asked for."""
    ended: bool = False
    exit_code: int | None = None
    used: float = field(default_factory=time.monotonic)
    watch: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.room = _MOST
        self.watch = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Until the command has ended and all that it has written is here."""
        try:
            await asyncio.gather(self._pump(self.stream.read), self._pump(self.stream.read_stderr))
            self.exit_code = await self.stream.wait()
        except (OSError, SandboxError) as error:
            self.chunks.append(f"\n{error}\n".encode())
            self.exit_code = -1
        finally:
            self.ended = True
            self.news.set()

    async def _pump(self, read: Callable[[], Awaitable[bytes]]) -> None:
        while chunk := await read():
            self.chunks.append(chunk)
            self.room -= len(chunk)
            self.news.set()
            async for _ in attempts(None, first=_PAUSE, most=_PAUSE):
                if self.room > 0:  # else until the caller asks again, or ends the command
                    break

    async def wait_for_news(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.news.wait(), seconds)
        except TimeoutError:
            return
        self.news.clear()

    async def first_output(self) -> None:
        """Waits for output or the end; both may not come."""
        async for _ in attempts(_PATIENCE, first=0.01, most=0.05):
            if self.chunks or self.ended:
                return

    async def close(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
            await asyncio.gather(self.watch, return_exceptions=True)
        await end(self.stream)


class Terminals:
    """The commands of one session, by the numbers that the model gets."""

    def __init__(self) -> None:
        self._open: dict[int, _Terminal] = {}

    async def start(
        self,
        stream: ExecStream,
        *,
        tty: bool,
        yield_time_s: float | None,
        max_output_tokens: int | None,
    ) -> PtyExecUpdate:
        """Take over a command that was just started. If there are too many, one ends for it."""
        terminal = _Terminal(stream, tty)
        await run(terminal.begin())
        await self._make_room()
        number = allocate_pty_process_id(set(self._open))
        self._open[number] = terminal
        await run(terminal.first_output())
        wait = 10_000 if yield_time_s is None else int(yield_time_s * 1000)
        return await self._update(
            number, terminal, clamp_pty_yield_time_ms(wait), max_output_tokens
        )

    async def write(
        self,
        number: int,
        text: str,
        *,
        yield_time_s: float | None,
        max_output_tokens: int | None,
    ) -> PtyExecUpdate:
        """Type into a command's terminal, or only see what it has written meanwhile."""
        terminal = self._open.get(number)
        if terminal is None:
            raise PtySessionNotFoundError(session_id=number)
        terminal.used, terminal.room = time.monotonic(), _MOST
        if text:
            if not terminal.tty:
                raise RuntimeError("stdin is not available for this process")
            try:
                await run(terminal.stream.write(text.encode()))
            except OSError:
                pass  # it has ended, which the update says
            await run(terminal.first_output())
            await asyncio.sleep(_PAUSE)
        wait = 250 if yield_time_s is None else int(yield_time_s * 1000)
        wait = resolve_pty_write_yield_time_ms(yield_time_ms=wait, input_empty=not text)
        return await self._update(number, terminal, wait, max_output_tokens)

    async def end_all(self) -> None:
        """End every command."""
        while self._open:
            await run(self._open.popitem()[1].close())

    async def _update(
        self, number: int, terminal: _Terminal, wait_ms: int, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        output, tokens, ended = await collect_pty_output(
            output_chunks=terminal.chunks,
            output_lock=asyncio.Lock(),
            output_notify=asyncio.Event(),
            is_done=lambda: terminal.ended,
            yield_time_ms=wait_ms,
            max_output_tokens=max_output_tokens,
            wait_for_output=lambda seconds: run(terminal.wait_for_news(seconds)),
        )
        if ended and self._open.pop(number, None) is not None:
            await run(terminal.close())
        return PtyExecUpdate(
            process_id=None if ended else number,
            output=output,
            exit_code=terminal.exit_code if ended else None,
            original_token_count=tokens,
        )

    async def _make_room(self) -> None:
        if len(self._open) < PTY_PROCESSES_MAX:
            return
        known = [(number, one.used, one.ended) for number, one in self._open.items()]
        oldest = process_id_to_prune_from_meta(known)
        if oldest is not None:
            await run(self._open.pop(oldest).close())
