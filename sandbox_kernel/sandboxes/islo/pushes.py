"""Host to sandbox: Islo's commands have no stdin, so other commands push the input.

A push is one exec of a few lines of shell that write a numbered file into the stream's folder and
wake the relay (``guest/commands/pushed.py``). Pushes may be repeated and may overtake each other:
the relay does each once, in order. Small writes that come while two pushes are in flight are
combined. Signals and the end of the command are urgent: they have their own numbers, wait for
nothing and are done at once.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence

PUSH = 72 * 1024
"""Bytes of one push; as base64 they are one argument, of which Linux allows 128 KiB."""
WINDOW = 6
"""Most pushes that the command has not taken yet."""
_EAGER = 2
"""Most pushes in flight before small writes are combined."""
_LATE = 5.0

_PUSH = 'cd "$1" 2>/dev/null || exit 0; printf %s "$3" >"$2"; printf . 1<>w'
_LAST = 'mkdir -p -m 700 "$1"; ' + _PUSH
"""For the end: a relay that starts later finds its folder taken, and exits."""

Execute = Callable[[Sequence[str]], Awaitable[object]]


def command(folder: str, name: str, text: str, *, last: bool = False) -> list[str]:
    """The command line of a push."""
    content = f"{len(text)}:{text}"
    return ["/bin/sh", "-c", _LAST if last else _PUSH, "sh", folder, name, content]


class Pusher:
    """The stdin of one command. ``execute`` runs a command in the sandbox, also several times the
    same one; it raises if the sandbox cannot be reached."""

    def __init__(self, folder: str, execute: Execute) -> None:
        self._folder = folder
        self._execute = execute
        self._buffer = bytearray()
        self._ending = self._ended = False
        self._next = 0
        self._unacknowledged: dict[int, str] = {}
        self._sent_at: dict[int, float] = {}
        self._urgent = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, data: bytes) -> None:
        """Push data to the command; waits until all of it is on its way."""
        view = memoryview(data)
        while view:
            await self._until(lambda: len(self._buffer) < PUSH)
            if self._over:
                raise BrokenPipeError(
                    f"the command takes no input: {self._failure or 'it has ended'}"
                )
            room = PUSH - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            self._advance()
        await self._until(lambda: not self._buffer)

    def end(self) -> None:
        """End the input after what was written."""
        self._ending = True
        self._advance()

    async def urge(self, text: str, *, last: bool = False) -> None:
        """Push a message that overtakes the others."""
        name = f"u{self._urgent}"
        self._urgent += 1
        await self._execute(command(self._folder, name, text, last=last))

    def acknowledged(self, count: int) -> None:
        """The relay has done the first ``count`` pushes."""
        for number in [n for n in self._unacknowledged if n < count]:
            del self._unacknowledged[number]
            self._sent_at.pop(number, None)
        self._advance()

    def missing(self, number: int) -> None:
        """The relay has not seen this push. If it is late, push it once more."""
        now = asyncio.get_running_loop().time()
        sent = self._sent_at.get(number)
        if number in self._unacknowledged and sent is not None and now - sent > _LATE:
            self._start(number)

    async def close(self) -> None:
        """Drop the queue. A caller that waits in ``write`` gets a BrokenPipeError."""
        self._closed = True
        self._changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _over(self) -> bool:
        return self._closed or self._failure is not None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._over:
            self._changed.clear()
            await self._changed.wait()

    def _due(self) -> bool:
        """Whether the next push is due."""
        if self._over or len(self._unacknowledged) >= WINDOW:
            return False
        if self._buffer:
            return len(self._buffer) >= PUSH or len(self._unacknowledged) < _EAGER
        return self._ending and not self._ended

    def _advance(self) -> None:
        """Something has changed: start the pushes that are due."""
        while self._due():
            self._ended = not self._buffer
            text = base64.b64encode(self._buffer).decode() or "end"
            self._buffer.clear()
            self._unacknowledged[self._next] = text
            self._start(self._next)
            self._next += 1
        self._changed.set()

    def _start(self, number: int) -> None:
        self._sent_at.pop(number, None)
        task = asyncio.get_running_loop().create_task(self._push(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _push(self, number: int) -> None:
        text = self._unacknowledged.get(number)
        if text is None:
            return  # an earlier attempt has done it
        try:
            await self._execute(command(self._folder, str(number), text))
            self._sent_at[number] = asyncio.get_running_loop().time()
        except Exception as error:  # noqa: BLE001  (the next ``write`` raises it)
            self._failure = error
            self._changed.set()
