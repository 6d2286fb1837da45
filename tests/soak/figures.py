"""What a server and its sandboxes hold, and whether it grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from sandbox_kernel.sandboxes.local.jail_state import measure

SLACK = {"fds": 12, "threads": 6, "rss_mib": 40.0, "sandboxes": 0, "inside": 15, "endpoints": 0}
"""How much more than at first is no growth: what is in use at the moment of the look."""
SHARE = 0.15


@dataclass(frozen=True)
class Figures:
    """At one moment in which nothing is asked of the server."""

    fds: int
    """Descriptors of the server's process."""
    threads: int
    rss_mib: float
    sandboxes: int
    inside: int
    """Processes in all jails of this machine's that are the server's."""
    endpoints: int
    """Folders of sockets for kernels."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in asdict(self).items())


def look(pid: int, runtime: Path) -> Figures:
    listed = sandboxes()
    status = Path(f"/proc/{pid}/status").read_text()
    value = {line.partition(":")[0]: line.split()[1:2] for line in status.splitlines()}
    return Figures(
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(value["Threads"][0]),
        rss_mib=int(value["VmRSS"][0]) / 1024,
        sandboxes=len(listed),
        inside=sum(sandbox["processes"] or 0 for sandbox in listed),
        endpoints=len(list(runtime.glob("c-*"))),
    )


def sandboxes() -> list[dict[str, Any]]:
    """As ``ps`` knows them."""
    ran = command("ps", "--all", "--json")
    listed: list[dict[str, Any]] = json.loads(ran.stdout)
    return listed


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``sandbox-kernel``; it must work."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "sandbox_kernel", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ran.returncode != 0:
        raise AssertionError(f"sandbox-kernel {' '.join(arguments)}: {ran.stdout}{ran.stderr}")
    return ran


def growth(series: list[Figures]) -> list[str]:
    """What is more at the end than after the warm-up. The first third is that."""
    third = max(1, len(series) // 3)
    early, late = series[third : 2 * third] or series[:1], series[-third:]
    found = []
    for field in fields(Figures):
        before = median(getattr(figures, field.name) for figures in early)
        after = median(getattr(figures, field.name) for figures in late)
        share = SHARE * before if field.name == "rss_mib" else 0
        if after > before + max(SLACK[field.name], share):
            found.append(f"{field.name} grew from {before:g} to {after:g}")
    return found


def resident(pid: int) -> float:
    """MiB of a process and all that come from it."""
    return measure(pid, None).memory / 2**20
