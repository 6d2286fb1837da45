"""What a jail's record, its files on the host and /proc tell: its processes, its state, its usage
and why it ended. The jail is not asked.

jailinit writes the state file; code in the jail cannot, but its names and numbers come from there,
so everything is bounded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from sandbox_kernel.guest.commands.start import process_stat
from sandbox_kernel.host_processes import ProcessId, reap
from sandbox_kernel.records import Record
from sandbox_kernel.sandboxes import creation_marker
from sandbox_kernel.sandboxes.base import Usage
from sandbox_kernel.sandboxes.local.cgroup import Cgroup
from sandbox_kernel.sandboxes.local.jail_folders import JailFolders
from sandbox_kernel.sandboxes.local.limits import MIB
from sandbox_kernel.sandboxes.untrusted_files import read_tail
from sandbox_kernel.untrusted_text import printable

_KILL_TIMEOUT = 30.0
"""Seconds; a fork bomb on a busy machine dies slowly."""
_MONITOR_TIMEOUT = 1.0
_ERROR_TAIL = 1500
_MAX_TEXT = 500


def process(record: Record, role: str) -> ProcessId | None:
    """The process ``init`` or ``bwrap``; None if there is none since this host was started."""
    found = record.data.get(role) if record.where == "here" else None
    return ProcessId(found[0], found[1]) if found else None


def kill(record: Record) -> bool:
    """Kill a jail's first process, with which Linux kills all others. False if it does not end."""
    ended = True
    for role in ("init", "bwrap"):
        found = process(record, role)
        if found is not None:
            # The monitor ends shortly after the first process.
            gone = role == "bwrap" and found.wait(_MONITOR_TIMEOUT)
            ended = (gone or found.kill(_KILL_TIMEOUT)) and ended
    reap()
    return ended


def saved_state(folders: JailFolders) -> dict[str, Any]:
    """The state that jailinit last wrote; empty if it cannot be read."""
    try:
        state = json.loads(read_tail(folders.state).partition("\n")[0] or "{}")
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def why_ended(record: Record) -> str:
    folders = JailFolders.from_json(record.data["folders"])
    said = saved_state(folders).get("reason") or read_tail(folders.ended, 200)
    if said:
        return str(said)[:_MAX_TEXT]
    if not folders.base.exists():
        return "it was removed"
    if creation_marker.unfinished(record):
        return "its creation was interrupted"
    return "it was killed from outside, or the host was restarted"


def log_excerpt(folders: JailFolders) -> str:
    tail = read_tail(folders.log, _ERROR_TAIL).strip()
    return f"Its log ends: {tail}" if tail else "Its log is empty."


def number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def memory_kills(state: Mapping[str, Any]) -> int:
    kills = state.get("kills")
    return number(kills.get("memory")) if isinstance(kills, dict) else 0


def killed(state: Mapping[str, Any]) -> dict[int, str]:
    """What the watch in the jail killed: pid -> why."""
    return {number(e.get("pid")): _text(e) for e in _events(state) if e.get("text")}


def last_kill(state: Mapping[str, Any], oom_kills: int, memory_limit: str) -> str:
    """In words. The cgroup counts kills; jailinit may know which process it was."""
    limit = memory_limit.partition(" (")[0]
    for event in reversed(_events(state)):
        if event.get("text"):
            return _text(event)
        if oom_kills and event.get("kind") == "killed" and event.get("name"):
            used = number(event.get("used")) // MIB
            return f"out of memory: {str(event['name'])[:100]!r} used {used} MiB of {limit}"
    if oom_kills:
        return f"out of memory: {oom_kills} process(es) were killed at the limit of {limit}"
    return ""


def _events(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    events = state.get("events")
    return [e for e in events if isinstance(e, dict)] if isinstance(events, list) else []


def _text(event: Mapping[str, Any]) -> str:
    return printable(str(event["text"])[:_MAX_TEXT])


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
