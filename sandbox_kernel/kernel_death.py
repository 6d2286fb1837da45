"""Why a kernel ended, in words: for the log, for ``ps``, and for the notebook whose cell it ran.

The agent reports exit code and pid, the sandbox what it or the system killed. A sandbox counts
kills over its whole life, so they are compared with those at the kernel's launch: earlier ones did
not kill it.
"""

from __future__ import annotations

import re
import signal

from sandbox_kernel.sandboxes.base import SandboxInfo
from sandbox_kernel.untrusted_text import printable

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a killed process, and of a shell whose command was killed."""
_MEMORY, _DISK, _PROCESSES = "out of memory", "disk full", "too many processes"
_BANNER = re.compile(
    r"NOTE: When using the `ipython kernel` entry point.*?"
    r"To connect another client to this kernel, use:\s*\n?(\s*--existing[^\n]*\n?)?",
    re.DOTALL,
)
"""What ipykernel prints at every start: that Ctrl-C does not work. It explains no death."""
_LINES = 20


def cause_of_death(
    code: int, pid: int | None, info: SandboxInfo, before: SandboxInfo | None
) -> str:
    """Why the kernel with this pid ended, if its sandbox knows; else its exit code in words.
    ``before``: the sandbox when the kernel was launched."""
    if code not in _KILLED:
        return describe_exit(code)
    killed, oom_kills = (before.killed, before.oom_kills) if before else ({}, 0)
    new = {p: why for p, why in info.killed.items() if killed.get(p) != why}
    if pid in new:
        return new[pid]
    others = sum(why.startswith(_MEMORY) for why in new.values())
    if info.oom_kills - oom_kills <= others:
        return describe_exit(code)
    limit, peak = info.limits.get("memory_mib", "its limit"), info.detail.get("peak_memory_mib")
    if peak:
        return f"{_MEMORY}: the sandbox used {peak} MiB of {limit}"
    return info.last_kill if info.last_kill.startswith(_MEMORY) else f"{_MEMORY}: {limit}"


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


def advice(cause: str) -> str:
    """What the user can do about a cause of death; empty if there is nothing to say."""
    for beginning, setting, what in (
        (_MEMORY, "memory_mib", "Let it use less memory"),
        (_DISK, "disk_mib", "Delete files"),
        (_PROCESSES, "processes", "Let it start fewer processes"),
    ):
        if cause.startswith(beginning):
            return (
                f"{what}, or give it more: {setting} in the kernelspec, or "
                f"SANDBOX_KERNEL_{setting.upper()}."
            )
    return ""


def last_words(output: str) -> str:
    """The end of what a kernel process printed, without what ipykernel prints at its start."""
    text = _BANNER.sub("", printable(output)).strip()
    return "\n".join(text.split("\n")[-_LINES:])
