"""A clock that goes on while the machine sleeps, to find dead links.

By ``time.monotonic`` and the event loop's clock, which stand still meanwhile, a laptop that was
shut for a night has heard from its sandboxes a moment ago.
"""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def since_boot() -> float:
    """Seconds since the machine was started, including those in which it slept."""
    return time.clock_gettime(_CLOCK)
