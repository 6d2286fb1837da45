"""Whether a process or a thread has nothing to do, without measuring its speed."""

from __future__ import annotations

import time
from pathlib import Path

from .waiting import wait_until

_LOOK = 0.05
"""Seconds between two looks. Whoever wakes up more often than that is busy."""


def comes_to_rest(pid: int, thread: int | None = None) -> None:
    """Wait until the thread (the first one, unless named) sleeps, and is not woken between two
    looks. AssertionError if that never happens: it spins."""
    place = Path(f"/proc/{pid}/task/{thread or pid}/status")
    wait_until(lambda: _rests(place), f"{place} comes to rest")


def _rests(status: Path) -> bool:
    before = _state(status)
    time.sleep(_LOOK)
    return before[0].startswith("S") and _state(status) == before


def _state(status: Path) -> tuple[str, str, str]:
    """Its state, and how often it has been put to sleep and taken off its CPU."""
    lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
    return lines["State"], lines["voluntary_ctxt_switches"], lines["nonvoluntary_ctxt_switches"]
