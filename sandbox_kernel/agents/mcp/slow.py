"""Work that may take longer than a call: it goes on, and the next call asks for its outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
Tell = Callable[[float, str], Awaitable[None]]
"""Reports seconds and a few words to a client that wants to know."""
TELL_EVERY = 1.0
_log = logging.getLogger(__name__)


class StillRunning(Exception):
    """The time of this call is over; the work is not."""


class NotReady(StillRunning):
    """The sandbox of a call is being made or attached to, so the call has done nothing."""


class SlowWork:
    """At most one task for each key. A call waits for it for a while; if that is not enough, a
    later call with the same key gets its outcome."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    async def outcome(
        self,
        key: Hashable,
        work: Callable[[], Coroutine[Any, Any, T]],
        seconds: float,
        tell: Tell | None = None,
        what: str = "",
    ) -> T:
        """Start the work, unless it runs already, and wait for it. StillRunning if it takes longer.
        ``tell`` hears of it every second. A cancelled call leaves it running."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.ensure_future(work())
        began = time.monotonic()
        while not task.done():
            left = seconds - (time.monotonic() - began)
            if left <= 0:
                raise StillRunning
            await asyncio.wait({task}, timeout=min(left, TELL_EVERY))
            if tell is not None and not task.done():
                await tell(time.monotonic() - began, what)
        if self._tasks.get(key) is task:
            del self._tasks[key]
        found: T = task.result()
        return found

    def begin(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start work whose outcome nobody asks for, unless it runs already."""
        if key in self._tasks:
            return

        def ended(task: asyncio.Task[Any]) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
                if not task.cancelled() and task.exception() is not None:
                    _log.warning("%s has failed: %s", key, task.exception())

        self._tasks[key] = task = asyncio.ensure_future(work())
        task.add_done_callback(ended)

    async def end(self) -> None:
        """Cancel everything, and wait until it has cleaned up."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                _log.warning("work that nobody waited for has failed: %s", found)
