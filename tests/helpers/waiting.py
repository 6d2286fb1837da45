"""Waiting for a condition that no event announces. Nothing else in the tests sleeps to wait."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SLOWNESS = float(os.environ.get("SANDBOX_KERNEL_TEST_PATIENCE", "1"))
"""How many times slower than a real machine this one is. The rig sets it."""
LIMIT = 120.0 * SLOWNESS
"""Seconds that anything may take on a busy machine. Nothing takes as long when all is well."""
_INTERVAL = 0.02


def wait_until(condition: Callable[[], T], what: str = "", limit: float = LIMIT) -> T:
    """Poll until the condition is true, and return its value. AssertionError if it never is."""
    deadline = time.monotonic() + limit
    while True:
        if found := condition():
            return found
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what or condition}"
        time.sleep(_INTERVAL)


async def until(condition: Callable[[], object], what: str = "", limit: float = LIMIT) -> Any:
    """As ``wait_until``, for coroutines. The condition may be a coroutine function."""
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what or condition}"
        await asyncio.sleep(_INTERVAL)


async def settled(turns: int = 50) -> None:
    """Let everything run that is ready, so that nothing more is to come. Without real I/O."""
    for _ in range(turns):
        await asyncio.sleep(0)
