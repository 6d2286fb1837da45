"""Asking again and again, with growing pauses, until a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


async def attempts(
    timeout: float | None, *, first: float = 0.05, most: float = 1.0, growth: float = 2.0
) -> AsyncIterator[None]:
    """One turn at once, and more after growing pauses (seconds), until the time is over. The last
    turn begins after the limit, so a caller that sees the end of the loop has really waited."""
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    pause = first
    while True:
        is_last = deadline is not None and loop.time() > deadline
        yield
        if is_last:
            return
        await asyncio.sleep(pause)
        pause = min(most, growth * pause)
