"""Ends a block of code in which nothing moves any more, or which may not go on."""

from __future__ import annotations

import asyncio
from types import TracebackType

_LATEST = 3600.0


class Watch:
    """``async with Watch(idle)``: TimeoutError in the block when ``moved`` was not called for so
    many seconds (math.inf: for ever), or the error that somebody gave to ``end``. A call of
    ``moved`` costs next to nothing, so that it may follow every piece of data."""

    def __init__(self, idle: float) -> None:
        self.idle = idle
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    def moved(self) -> None:
        self._last = self._loop.time()

    def hurry(self, idle: float) -> None:
        """From now on, wait no longer than this."""
        if idle < self.idle:
            self.idle = idle
            self._arm()

    def end(self, error: Exception) -> None:
        """Raise this in the block, as soon as it waits."""
        if self._timer is not None and self._error is None:
            self._error = error
            self._expire()

    async def __aenter__(self) -> Watch:
        await self._timeout.__aenter__()
        self.moved()
        self._arm()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self._error is not None:
                raise self._error from None
            raise

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Not every event loop has a time so far away.
        latest = self._loop.time() + _LATEST
        self._timer = self._loop.call_at(min(self._last + self.idle, latest), self._look)

    def _look(self) -> None:
        if self._loop.time() >= self._last + self.idle:
            self._expire()
        else:
            self._arm()

    def _expire(self) -> None:
        if not self._timeout.expired():  # nor about to
            self._timeout.reschedule(self._loop.time())
