"""What a jail uses, measured from outside: by its cgroup, and by the host's /proc.

It does not ask the jail.
"""

from __future__ import annotations

import os

from sandbox_kernel.guest.commands.start import process_stat
from sandbox_kernel.sandboxes.base import Usage
from sandbox_kernel.sandboxes.local.cgroup import Cgroup


def measure(first: int, cgroup: Cgroup | None) -> Usage:
    """Usage of a jail: of its first process and all descendants."""
    resident = processes = 0
    ticks = 0.0
    for pid in _family(first):
        fields = process_stat(pid)
        if fields:
            processes += 1
            ticks += int(fields[11]) + int(fields[12])
            resident += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    by_cgroup = cgroup.memory_in_use() if cgroup else None
    return Usage(
        memory=resident if by_cgroup is None else by_cgroup,
        processes=processes,
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
    )


def _family(first: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := process_stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found = [first]
    for pid in found:
        found += children.get(pid, [])
    return found
