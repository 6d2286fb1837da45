"""What a jail uses, measured from outside: by its cgroup, and by the host's /proc.

It does not ask the jail.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sandbox_kernel.sandboxes.base import Usage
from sandbox_kernel.sandboxes.local.cgroup import Cgroup

_CACHE = {1: "total_inactive_file", 2: "inactive_file"}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}


def measure(first: int, cgroup: Cgroup | None) -> Usage:
    """Usage of a jail: of its first process and all descendants."""
    resident = processes = 0
    ticks = 0.0
    for pid in _family(first):
        fields = _stat(pid)
        if fields:
            processes += 1
            ticks += int(fields[11]) + int(fields[12])
            resident += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    by_cgroup = _memory(cgroup) if cgroup else None
    return Usage(
        memory=resident if by_cgroup is None else by_cgroup,
        processes=processes,
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
    )


def _memory(cgroup: Cgroup) -> int | None:
    """As the limit counts it, without what the kernel would drop before it kills somebody."""
    folder = cgroup.folders.get("memory")
    if folder is None:
        return None
    try:
        used = int(Path(folder, _USED[cgroup.version]).read_text())
        for line in Path(folder, "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == _CACHE[cgroup.version]:
                used -= int(count)
    except (OSError, ValueError):
        return None
    return max(0, used)


def _family(first: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found = [first]
    for pid in found:
        found += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
