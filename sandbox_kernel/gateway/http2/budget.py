"""Bounds the bytes that are kept for receivers that do not take them."""

from __future__ import annotations

from collections.abc import Callable

LIMIT = 64 << 20


class Budget:
    """Shared by all connections of a gateway. Beyond it, peers get no more room to send."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept = 0
        self._waiting: set[Callable[[], None]] = set()

    @property
    def kept(self) -> int:
        return self._kept

    @property
    def exceeded(self) -> bool:
        return self._kept > self._limit

    def keep(self, size: int) -> None:
        self._kept += size

    def release(self, size: int) -> None:
        was_exceeded = self.exceeded
        self._kept -= size
        if was_exceeded and not self.exceeded:
            waiting, self._waiting = self._waiting, set()
            for call in waiting:
                call()

    def when_released(self, call: Callable[[], None]) -> None:
        """Call this once when there is room again."""
        self._waiting.add(call)

    def forget(self, call: Callable[[], None]) -> None:
        self._waiting.discard(call)
