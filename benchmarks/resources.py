"""CPU time and memory of processes and threads, from /proc."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TUNNEL_THREAD = "sandbox-kernel"


@dataclass(frozen=True)
class Cpu:
    """CPU seconds used so far."""

    process: float
    tunnel: float | None
    """CPU seconds of the tunnel's thread; None if there is none."""

    @classmethod
    def now(cls) -> Cpu:
        thread = next((t for t in threading.enumerate() if t.name == TUNNEL_THREAD), None)
        clock = thread and thread.ident and time.pthread_getcpuclockid(thread.ident)
        return cls(time.process_time(), time.clock_gettime(clock) if clock else None)


def pss(pid: int | str = "self") -> int:
    """Proportional set size, in bytes: the process's own memory and its share of shared pages.

    0 for a process that has ended; PermissionError if this user may not inspect it.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line[:4] == "Pss:")


def memory_by_part(root: int) -> dict[str, int]:
    """PSS of all processes below ``root``, by role."""
    everybody = {int(entry): _stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    stats: dict[int, list[str]] = {}
    parents = {root}
    while parents:
        found = {pid: stat for pid, stat in everybody.items() if stat and int(stat[1]) in parents}
        stats |= found
        parents = set(found)
    commands = {pid: _command(pid) for pid in stats}
    total: dict[str, int] = {}
    for pid in stats:
        part = _part(pid, commands, stats)
        total[part] = total.get(part, 0) + pss(pid)
    return total


def _part(pid: int, commands: dict[int, list[str]], stats: dict[int, list[str]]) -> str:
    """The role of a process. Processes of the guest program may share one command line, so this
    looks at their parents."""
    parent = int(stats[pid][1])
    command = commands[pid]
    if _is_bwrap(command):
        return "init"
    if _is_guest_program(command):
        if _is_bwrap(commands.get(parent, [])):
            return "init"
        has_kernel = any(int(stat[1]) == pid for stat in stats.values())
        return "agent" if has_kernel else "connector"
    if command == ["cat"] and _is_guest_program(commands.get(parent, [])):
        return "connector"  # what waits in its place
    if "ipykernel_launcher" in command:
        if not _is_guest_program(commands.get(parent, [])):
            return "kernel"
        # The agent is the parent of the kernel, its spare, which is younger, and the warm
        # interpreter, which has one thread.
        if _threads(stats[pid]) == 1:
            return "warm"
        born = int(stats[pid][19])
        older = [
            other
            for other, stat in stats.items()
            if int(stat[1]) == parent and _threads(stat) > 1 and int(stat[19]) < born
        ]
        return "spare" if any("ipykernel_launcher" in commands[o] for o in older) else "kernel"
    return "other"


def _threads(stat: list[str]) -> int:
    return int(stat[17])


def _is_bwrap(command: list[str]) -> bool:
    return bool(command) and os.path.basename(command[0]) == "bwrap"


def _is_guest_program(command: list[str]) -> bool:
    return any("sandbox_guest" in argument for argument in command[:5])


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
