"""Bounds frames that cost their sender nothing: pings, settings, resets, empty data."""

from __future__ import annotations

import time
from collections.abc import Callable

from sandbox_kernel.gateway.refusals import Refusal


class Flood(Refusal):
    def __init__(self, what: str) -> None:
        super().__init__(400, f"bad HTTP/2: too many {what}")


class Allowance:
    """So many at once, and so many more a second."""

    def __init__(
        self,
        what: str,
        at_once: int,
        a_second: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._most = float(at_once)
        self._a_second = a_second
        self._left = float(at_once)
        self._clock = clock
        self._last = clock()

    def spend(self) -> None:
        """Flood if there is none left."""
        now = self._clock()
        self.earn((now - self._last) * self._a_second)
        self._last = now
        if self._left < 1:
            raise Flood(self._what)
        self._left -= 1

    def earn(self, more: float) -> None:
        self._left = min(self._most, self._left + more)
