"""The limits of a local jail: what the spec asks for, and what of it a cgroup can enforce here.

What no cgroup enforces is enforced from inside, by rlimits and by the watch in
``guest/jail/init.py``; ``Limits.for_guest`` tells it which. ``Limits.in_words`` says what is in
force and by what means, for ``SandboxInfo.limits``.
"""

from __future__ import annotations

import math
import os
import random
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandbox_kernel.errors import SpecRefused
from sandbox_kernel.sandboxes.local.cgroup import Cgroup, memory_here
from sandbox_kernel.spec import SandboxSpec

MIB = 2**20
DEFAULT_MEMORY_FRACTION = 0.25
"""Of the host's memory, for a spec without memory_mib: three sandboxes leave it a quarter."""
DEFAULT_MEMORY_LEAST = 2048 * MIB
"""If a quarter is less: so much, but never more than three quarters."""
DEFAULT_PROCESSES = 1024
DEFAULT_OPEN_FILES = 4096
DEFAULT_DISK_MIB = 10 * 1024
_DATA_SLACK = 1.25
_LEAST_FILE_SIZE = 8 * MIB


@dataclass(frozen=True)
class Limits:
    """What a jail may use, in bytes and counts; ``cpus`` of None means all."""

    memory: int
    cpus: float | None
    processes: int
    open_files: int
    disk: int

    @classmethod
    def of(cls, spec: SandboxSpec) -> Limits:
        """The spec's limits, or defaults. SpecRefused for more than this host can give."""
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if most_files == resource.RLIM_INFINITY:
            most_files = 2**31
        if (spec.open_files or 0) > most_files:
            raise SpecRefused(
                f"Sandbox {spec.name!r} was not created: open_files={spec.open_files} is more than "
                f"this process may open itself ({most_files}). Ask for less, or raise the hard "
                f"limit (ulimit -Hn)."
            )
        return cls(
            memory=spec.memory_mib * MIB if spec.memory_mib else _default_memory(),
            cpus=spec.cpus,
            processes=spec.processes or DEFAULT_PROCESSES,
            open_files=spec.open_files or min(DEFAULT_OPEN_FILES, most_files),
            disk=(spec.disk_mib or DEFAULT_DISK_MIB) * MIB,
        )

    def for_guest(
        self, cgroup: Cgroup | None, folders: Sequence[str], *, own_disk: bool = False
    ) -> dict[str, Any]:
        """The part of jailinit's configuration that is about limits. ``own_disk``: the folders
        are a file system of their own, which is as large as it may get."""
        held = cgroup.folders if cgroup else {}
        rlimits = {
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_FSIZE": max(self.disk, _LEAST_FILE_SIZE),
        }
        if "memory" not in held:
            rlimits["RLIMIT_DATA"] = int(self.memory * _DATA_SLACK)
        if "pids" not in held and _process_rlimit_works():
            rlimits["RLIMIT_NPROC"] = self.processes
        watch_processes = "pids" not in held and "RLIMIT_NPROC" not in rlimits
        return {
            "rlimits": {name: _at_most_hard(name, value) for name, value in rlimits.items()},
            "watch": {
                "memory": None if "memory" in held else self.memory,
                "processes": self.processes if watch_processes else None,
                "disk": None if own_disk else self.disk,
                "folders": list(folders),
            },
        }

    def in_words(self, cgroup: Cgroup | None, *, own_disk: bool = False) -> dict[str, str]:
        """Spec field -> the value in force and by what."""
        held = cgroup.folders if cgroup else {}
        by_cgroup = f"cgroup v{cgroup.version}" if cgroup else ""
        memory = by_cgroup if "memory" in held else "rlimit and watch"
        disk = "own file system" if own_disk else "rlimit a file, and watch"
        processes = "rlimit" if _process_rlimit_works() else "watch"
        usable = len(os.sched_getaffinity(0))
        if self.cpus is None:
            cpus = f"all {usable}"
        elif "cpu" in held:
            cpus = f"{self.cpus:g} ({by_cgroup})"
        else:
            cpus = f"{min(math.ceil(self.cpus), usable)} (CPU affinity)"
        return {
            "memory_mib": f"{self.memory // MIB} MiB ({memory})",
            "open_files": f"{self.open_files} a process (rlimit)",
            "disk_mib": f"{self.disk // MIB} MiB ({disk})",
            "processes": f"{self.processes} ({by_cgroup if 'pids' in held else processes})",
            "cpus": cpus,
        }

    def choose_cpus(self) -> list[int] | None:
        """As many CPUs as asked for, at random, so that jails do not crowd on the first ones. None
        for all. A jail is held to them also if a cgroup says how much of them it gets: this is
        how programs in it find out how many threads make sense."""
        usable = sorted(os.sched_getaffinity(0))
        if self.cpus is None or math.ceil(self.cpus) >= len(usable):
            return None
        return sorted(random.sample(usable, math.ceil(self.cpus)))


def _default_memory() -> int:
    host = memory_here()
    return int(max(host * DEFAULT_MEMORY_FRACTION, min(DEFAULT_MEMORY_LEAST, host * 0.75)))


def _process_rlimit_works() -> bool:
    """Whether RLIMIT_NPROC holds: not for root, nor before Linux 5.14 (it counted other
    processes)."""
    version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return os.getuid() != 0 and version >= (5, 14)


def _at_most_hard(name: str, value: int) -> int:
    hard = resource.getrlimit(getattr(resource, name))[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
