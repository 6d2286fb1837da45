"""The jail's own /proc/meminfo: its limit and its use, in place of the host's figures.

The host mounts the file read-only; process 1 of the jail updates it through a descriptor.
"""

from __future__ import annotations

import os
import time

from .watchdog import memory_in_use, processes

EVERY = 1.0
"""Least seconds between two updates."""
_COST = 50
"""Least pause after an update, as a multiple of its time."""
_LEAST_CHANGE = 256
"""A change of less than 1/256 of the total is not written."""
_ZEROS = (
    *("Buffers", "Cached", "SwapCached", "Active", "Inactive", "Active(anon)", "Inactive(anon)"),
    *("Active(file)", "Inactive(file)", "Unevictable", "Mlocked", "SwapTotal", "SwapFree"),
    *("Dirty", "Writeback", "AnonPages", "Mapped", "Shmem", "KReclaimable", "Slab"),
    *("SReclaimable", "SUnreclaim"),
)


def meminfo(total: int, used: int) -> bytes:
    """The file's content. Its length is constant, so a reader never sees a truncated file."""
    free = max(0, total - used)
    values = {"MemTotal": total, "MemFree": free, "MemAvailable": free, **dict.fromkeys(_ZEROS, 0)}
    values.update({"Active": used, "Active(anon)": used, "AnonPages": used})
    sizes = {name: min(value, total) // 1024 for name, value in values.items()}
    return "".join(f"{name + ':':<16}{size:>12} kB\n" for name, size in sizes.items()).encode()


class MemoryView:
    """Keeps the file at ``fd`` up to date."""

    def __init__(self, fd: int, total: int) -> None:
        self._fd = fd
        self._total = total
        self._written = -self._total

    def update(self) -> float:
        """Update once. Returns the seconds until the next update."""
        started = time.monotonic()
        used = memory_in_use(processes())
        if abs(used - self._written) >= self._total // _LEAST_CHANGE:
            try:
                os.pwrite(self._fd, meminfo(self._total, used), 0)
                self._written = used
            except OSError:
                pass  # the host's disk is full; the old figures stay
        return max(EVERY, _COST * (time.monotonic() - started))
