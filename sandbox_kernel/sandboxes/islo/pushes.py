"""Host to sandbox: Islo's commands have no stdin, so what is for one is pushed by other commands.

A push is one exec of a few lines of shell that write a numbered file into the stream's folder and
wake the relay. It can be repeated without harm, and pushes may overtake each other: the relay
does them in order, once. Small writes that come while two pushes are under way wait and go
together. Signals and the end of the command are urgent: numbered by themselves, they wait for
nothing and are done at once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, Sequence

PUSH = 72 * 1024
"""Bytes of one push; as base64 they are one argument, of which Linux allows 128 KiB."""
WINDOW = 6
"""Pushes that the command has not taken yet."""
_EAGER = 2
"""So many small pushes may be under way at once."""
_LATE = 5.0

_PUSH = 'cd "$1" 2>/dev/null || exit 0; printf %s "$3" >"$2"; printf . 1<>w'
_LAST = 'mkdir -p -m 700 "$1"; ' + _PUSH
"""For the end: if the relay has not begun yet, it finds its folder taken, and does not."""

Execute = Callable[[Sequence[str]], Awaitable[object]]


def command(folder: str, name: str, text: str, *, last: bool = False) -> list[str]:
    """The command line of a push."""
    content = f"{len(text)}:{text}"
    return ["/bin/sh", "-c", _LAST if last else _PUSH, "sh", folder, name, content]


class Pusher:
    """What is written to one command's stdin. ``execute`` runs a command in the sandbox and may
    be called again with the same one; it raises if the sandbox cannot be reached."""

    def __init__(self, folder: str, execute: Execute) -> None:
        self._folder = folder
        self._execute = execute
        self._buffer = bytearray()
        self._ending = False
        self._next = 0
        self._unacknowledged: dict[int, str] = {}
        self._sent_at: dict[int, float] = {}
        self._urgent = 0
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._closed = self._waking = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender = asyncio.get_running_loop().create_task(self._send())

    async def write(self, data: bytes) -> None:
        """Take data for the command; waits while too much of it has not been taken."""
        view = memoryview(data)
        while view:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._buffer) < PUSH or self._over)
                self._check()
                room = PUSH - len(self._buffer)
                self._buffer += view[:room]
                view = view[room:]
                self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until all that was written is on its way."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._buffer or self._over)

    async def end(self) -> None:
        async with self._changed:
            self._ending = True
            self._changed.notify_all()

    async def urge(self, text: str, *, last: bool = False) -> None:
        """Push something that overtakes all the rest."""
        name = f"u{self._urgent}"
        self._urgent += 1
        await self._execute(command(self._folder, name, text, last=last))

    def acknowledged(self, count: int) -> None:
        """The relay has done the first ``count`` pushes."""
        for number in [n for n in self._unacknowledged if n < count]:
            del self._unacknowledged[number]
            self._sent_at.pop(number, None)
        self._wake()

    def missing(self, number: int) -> None:
        """The relay has not seen this push. If it should have by now, it is pushed once more."""
        now = asyncio.get_running_loop().time()
        sent = self._sent_at.get(number)
        if number in self._unacknowledged and sent is not None and now - sent > _LATE:
            self._start(number)

    async def close(self) -> None:
        """Give up what was not pushed yet. Whoever waits in ``write`` gets a BrokenPipeError."""
        self._closed = True
        tasks = [self._sender, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._changed:
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._closed or self._failure is not None

    def _check(self) -> None:
        if self._over:
            raise BrokenPipeError(f"the command takes no input: {self._failure or 'it has ended'}")

    def _wake(self) -> None:
        async def wake() -> None:
            async with self._changed:
                self._waking = False
                self._changed.notify_all()

        # One task for all reasons that there are by then: a hostile sandbox may find many.
        if not self._waking:
            self._waking = True
            self._keep(asyncio.get_running_loop().create_task(wake()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ready(self) -> bool:
        """Whether the next push is to be made now."""
        if len(self._unacknowledged) >= WINDOW:
            return False
        if self._buffer:
            return len(self._buffer) >= PUSH or len(self._unacknowledged) < _EAGER
        return self._ending

    async def _send(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(self._ready)
                text = "end"
                if self._buffer:
                    text = base64.b64encode(self._buffer).decode()
                    self._buffer.clear()
                ended = text == "end"
                number, self._next = self._next, self._next + 1
                self._unacknowledged[number] = text
                self._changed.notify_all()
            self._start(number)
            if ended:
                return

    def _start(self, number: int) -> None:
        self._sent_at.pop(number, None)
        self._keep(asyncio.get_running_loop().create_task(self._push(number)))

    async def _push(self, number: int) -> None:
        try:
            with contextlib.suppress(KeyError):  # it was done by an earlier attempt
                text = self._unacknowledged[number]
                await self._execute(command(self._folder, str(number), text))
                self._sent_at[number] = asyncio.get_running_loop().time()
        except Exception as error:  # noqa: BLE001  (whoever writes next is told)
            self._failure = error
            self._wake()
