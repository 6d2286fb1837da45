"""The jail's own /proc/meminfo: its limit and what it uses, in place of the host's figures.

The host makes the file and shows it, read-only, in the jail; ``jailinit`` keeps it up to date
through a descriptor.
"""

from __future__ import annotations

import os
import time

from .jailwatch import memory_in_use, processes

EVERY = 1.0
"""Seconds between two looks, at least."""
_COST = 50
"""So many times as long as a look took, there is no other."""
_WORTH_SAYING = 256
"""A change of less than this part of the whole is not written down."""
_ZEROS = (
    *("Buffers", "Cached", "SwapCached", "Active", "Inactive", "Active(anon)", "Inactive(anon)"),
    *("Active(file)", "Inactive(file)", "Unevictable", "Mlocked", "SwapTotal", "SwapFree"),
    *("Dirty", "Writeback", "AnonPages", "Mapped", "Shmem", "KReclaimable", "Slab"),
    *("SReclaimable", "SUnreclaim"),
)


def meminfo(total: int, used: int) -> bytes:
    """The file's content. Always of the same length, so that a reader never sees half of it."""
    free = max(0, total - used)
    values = {"MemTotal": total, "MemFree": free, "MemAvailable": free, **dict.fromkeys(_ZEROS, 0)}
    values.update({"Active": used, "Active(anon)": used, "AnonPages": used})
    lines = (
        f"{name + ':':<16}{min(value, total) // 1024:>12} kB" for name, value in values.items()
    )
    return ("\n".join(lines) + "\n").encode()


class MemoryView:
    """Keeps the file at ``fd`` true."""

    def __init__(self, fd: int, total: int) -> None:
        self._fd = fd
        self._total = total
        self._said = -self._total

    def update(self) -> float:
        """Look once. Returns the seconds until the next look."""
        started = time.monotonic()
        used = memory_in_use(processes())
        if abs(used - self._said) >= self._total // _WORTH_SAYING:
            try:
                os.pwrite(self._fd, meminfo(self._total, used), 0)
                self._said = used
            except OSError:
                pass  # the host's disk is full: the figures are those of before
        return max(EVERY, _COST * (time.monotonic() - started))
