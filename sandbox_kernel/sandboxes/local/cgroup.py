"""Cgroups of a jail, of version 2 or 1: making them where this process may, and reading them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_kernel.sandboxes.local.limits import Limits

NO_CGROUP = "SANDBOX_KERNEL_NO_CGROUP"
"""Environment variable: set to 1, no cgroup is used even where one could be."""
CPU_PERIOD_US = 100_000
IO_WEIGHT = 50
"""A sandbox's share of the disk's time when others want it, too. Everybody else has 100."""
_PREFIX = "sandbox-kernel-"
_REMOVE_TIMEOUT = 3.0
_SWEEP_AGE = 60.0
_CONTROLLERS = ("memory", "pids", "cpu")
_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes", "io.weight")
"""There may be no swap accounting, and no io controller or no scheduler that weighs."""


@dataclass(frozen=True)
class Cgroup:
    """A cgroup of one jail, or several with the old version: one in each controller's tree."""

    version: int
    folders: dict[str, str]
    """Controller (memory, pids, cpu) -> folder. A controller that is not there is not in force."""

    @classmethod
    def create(cls, sandbox_id: str, limits: Limits) -> Cgroup | None:
        """Make one by trying; None where this process may not."""
        if not cgroups_allowed():
            return None
        return _create_v2(sandbox_id, limits) or _create_v1(sandbox_id, limits)

    def add(self, pid: int) -> bool:
        """Put a process into it. False if that is not allowed; then the cgroup is gone again."""
        try:
            for folder in set(self.folders.values()):
                _write(folder, "cgroup.procs", pid)
        except OSError:
            self.remove()
            return False
        return True

    def oom_kills(self) -> int:
        """How many processes the kernel killed at the memory limit. 0 once the cgroup is gone."""
        return _counts(self._memory("memory.oom_control", "memory.events")).get("oom_kill", 0)

    def peak_memory(self) -> int:
        """Bytes that its processes used at most, together. 0 where that is not counted."""
        return int(self._memory("memory.max_usage_in_bytes", "memory.peak") or 0)

    def memory_in_use(self) -> int | None:
        """Bytes as the limit counts them, without what the kernel would drop before it kills
        somebody. None where that is not counted."""
        used = self._memory("memory.usage_in_bytes", "memory.current")
        counts = _counts(self._memory("memory.stat", "memory.stat"))
        if not used or not counts:
            return None
        cache = "inactive_file" if self.version == 2 else "total_inactive_file"
        return max(0, int(used) - counts.get(cache, 0))

    def _memory(self, *names: str) -> str:
        """A memory controller's file, by its names in version 1 and 2; empty if missing."""
        with contextlib.suppress(OSError, KeyError):
            return Path(self.folders["memory"], names[self.version - 1]).read_text()
        return ""

    def remove(self) -> None:
        """Delete it; its processes must have ended. Gives up if it stays busy for a while."""
        deadline = time.monotonic() + _REMOVE_TIMEOUT
        left = set(self.folders.values())
        while left := {folder for folder in left if not _rmdir(folder)}:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "folders": self.folders}

    @classmethod
    def from_json(cls, values: dict[str, Any] | None) -> Cgroup | None:
        return cls(values["version"], dict(values["folders"])) if values else None


def cgroups_allowed() -> bool:
    return os.environ.get(NO_CGROUP, "") in ("", "0")


def own_unified_path() -> str:
    """The cgroup of version 2 that this process is in."""
    return _memberships().get("", "/")


def unified_folder(path: str) -> Path | None:
    """Where a cgroup of version 2 is seen here, by its path in /proc/<pid>/cgroup."""
    folders = (_own_folder(point, root, path) for point, root, _ in _mounts("cgroup2"))
    return next(filter(None, folders), None)


def sweep_cgroups(known: set[str]) -> None:
    """Delete empty cgroups of sandboxes that are none of ``known`` (ids): their process died
    before it could. Young ones stay, because another process may be about to use them."""
    for parent in {*_v2_parents(), *(folder for _, folder in _v1_parents())}:
        with contextlib.suppress(OSError):
            for folder in parent.glob(f"{_PREFIX}*"):
                if folder.name.removeprefix(_PREFIX) in known:
                    continue
                with contextlib.suppress(OSError):
                    if time.time() - folder.stat().st_mtime > _SWEEP_AGE:
                        _rmdir(str(folder))


def _create_v2(sandbox_id: str, limits: Limits) -> Cgroup | None:
    settings = _settings(2, limits)
    for parent in _v2_parents():
        folder = parent / f"{_PREFIX}{sandbox_id}"
        with contextlib.suppress(OSError):
            enabled = _enable_v2(parent)
            files = {file: value for name in enabled for file, value in settings[name].items()}
            # memory.oom.group stays off: it would end the agent with the process that is too big.
            files["io.weight"] = IO_WEIGHT
            if {"memory", "pids"} & set(enabled) and _make(folder, files):
                return Cgroup(2, dict.fromkeys(enabled, str(folder)))
    return None


def _enable_v2(parent: Path) -> list[str]:
    """The controllers that a new cgroup below ``parent`` has, after turning on what can be."""
    available = (parent / "cgroup.controllers").read_text().split()
    for name in (*_CONTROLLERS, "io"):
        if name in available:
            # Busy while the parent itself has processes: then it stays off.
            with contextlib.suppress(OSError):
                _write(parent, "cgroup.subtree_control", f"+{name}")
    enabled = (parent / "cgroup.subtree_control").read_text().split()
    return [name for name in _CONTROLLERS if name in enabled]


def _create_v1(sandbox_id: str, limits: Limits) -> Cgroup | None:
    folders = {}
    for name, parent in _v1_parents():
        folder = parent / f"{_PREFIX}{sandbox_id}"
        files = _settings(1, limits)[name]
        if files and _make(folder, files):
            folders[name] = str(folder)
    return Cgroup(1, folders) if folders else None


def _settings(version: int, limits: Limits) -> dict[str, dict[str, int | str]]:
    """Controller -> file -> what to write there."""
    size, quota = limits.memory, max(1000, int((limits.cpus or 0) * CPU_PERIOD_US))
    memory: dict[str, int | str] = {"memory.max": size, "memory.swap.max": 0}
    cpu: dict[str, int | str] = {"cpu.max": f"{quota} {CPU_PERIOD_US}"}
    if version == 1:
        memory = {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
        cpu = {"cpu.cfs_period_us": CPU_PERIOD_US, "cpu.cfs_quota_us": quota}
    pids: dict[str, int | str] = {"pids.max": limits.processes}
    return {"memory": memory, "pids": pids, "cpu": cpu if limits.cpus else {}}


def _make(folder: Path, files: Mapping[str, int | str]) -> bool:
    """Make a cgroup with these settings. False, and there is none, if that is not allowed."""
    try:
        folder.mkdir(exist_ok=True)  # two controllers of version 1 may share a tree
        for file, value in files.items():
            try:
                _write(folder, file, value)
            except OSError:
                if file not in _OPTIONAL:
                    raise
    except OSError:
        _rmdir(str(folder))
        return False
    return True


def _v2_parents() -> Iterator[Path]:
    """Where a cgroup could be made: next to our own first, because one that holds processes, as
    ours does, can have no children with limits."""
    for point, root, _ in _mounts("cgroup2"):
        own = _own_folder(point, root, own_unified_path())
        if own is not None:
            if own != point:
                yield own.parent
            yield own


def _v1_parents() -> Iterator[tuple[str, Path]]:
    memberships = _memberships()
    for point, root, options in _mounts("cgroup"):
        for name in _CONTROLLERS:
            if name in options and name in memberships:
                own = _own_folder(point, root, memberships[name])
                if own is not None:
                    yield name, own


def _own_folder(point: Path, root: str, path: str) -> Path | None:
    """The folder of a cgroup path below a mount that shows the tree from ``root`` on."""
    if root != "/":
        if path != root and not path.startswith(f"{root}/"):
            return None
        path = path[len(root) :]
    folder = point / path.lstrip("/")
    return folder if folder.is_dir() else None


def _memberships() -> dict[str, str]:
    """Controller -> cgroup path of this process; the empty name stands for version 2."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found


def _mounts(kind: str) -> list[tuple[Path, str, list[str]]]:
    """(mount point, root, options) of the mounts of a file system type."""
    found = []
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n"):
        fields, _, rest = line.partition(" - ")
        tail = rest.split()
        if tail and tail[0] == kind:
            head = fields.split(" ")
            found.append((Path(head[4]), head[3], tail[-1].split(",")))
    return found


def _write(folder: str | Path, file: str, value: int | str) -> None:
    # Unbuffered, so that a refusal is seen here; never makes a file.
    fd = os.open(os.path.join(folder, file), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _rmdir(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


def _counts(text: str) -> dict[str, int]:
    """The numbers of a file with lines of a name and a number."""
    return {name: int(number) for name, number in map(str.split, text.splitlines())}


def memory_here() -> int:
    """What this machine has, or the container that this process is in."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return min([*sizes, *(most for most, _ in _memory_limits())])


def memory_left() -> float:
    """The share of ``memory_here`` that is available, from 0 to 1: the machine's, or the least of
    those that the cgroups of this process may use."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(facts[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    shares = [
        1 - _memory_used(folder) / most
        for most, folder in _memory_limits()
        if 0 < most < total * 1024
    ]
    return max(0.0, min([available / total, *shares]))


def _memory_limits() -> Iterator[tuple[int, Path]]:
    """The limits of this process's cgroups, and their folders."""
    memberships = _memberships()
    for kind, name, file in (
        ("cgroup2", "", "memory.max"),
        ("cgroup", "memory", "memory.limit_in_bytes"),
    ):
        for point, root, options in _mounts(kind):
            if name not in (*options, "") or name not in memberships:
                continue
            folder = _own_folder(point, root, memberships[name])
            while folder is not None and folder.is_relative_to(point):
                with contextlib.suppress(OSError, ValueError):
                    yield int((folder / file).read_text()), folder
                folder = folder.parent


def _memory_used(folder: Path) -> int:
    """Bytes in use, without reclaimable page cache; 0 if they cannot be read."""
    for used, reclaimable in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):
            counts = _counts((folder / "memory.stat").read_text())
            return max(0, int((folder / used).read_text()) - counts[reclaimable])
    return 0
