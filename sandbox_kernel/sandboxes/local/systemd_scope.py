"""A cgroup for a jail from systemd, as rootless Podman gets one: a transient scope.

Used by ``Launch``, which makes a cgroup itself where there is no systemd to ask. An ordinary user
asks the user's manager, root the system's. The scope ends with the jail.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import time
from pathlib import Path

from sandbox_kernel.host_programs import find_program, run_program
from sandbox_kernel.sandboxes.local import cgroup
from sandbox_kernel.sandboxes.local.cgroup import Cgroup
from sandbox_kernel.sandboxes.local.limits import Limits

_TIMEOUT = 5.0
_POLL = 0.005
_LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose manager does not end when the user logs out."""
_MANAGER = (
    *("org.freedesktop.systemd1", "/org/freedesktop/systemd1"),
    *("org.freedesktop.systemd1.Manager", "StartTransientUnit"),
)


def create(sandbox_id: str, pid: int, limits: Limits) -> Cgroup | None:
    """Have ``pid`` put into a scope with these limits. None where there is no manager, or none
    that can limit memory or processes. Takes a few milliseconds, and seconds at most."""
    bus = _bus()
    busctl = find_program("busctl")
    if bus is None or busctl is None or not cgroup.cgroups_allowed() or not _can_limit():
        return None
    if bus in _in_vain:
        return None
    unit = f"sandbox-kernel-{sandbox_id}.scope"
    try:
        command = [busctl, f"--address=unix:path={bus}", f"--timeout={_TIMEOUT:g}", "--quiet"]
        command += ["call", *_MANAGER, "ssa(sv)a(sa(sv))", unit, "fail"]
        if run_program([*command, *_properties(pid, limits), "0"], 2 * _TIMEOUT).returncode:
            return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    folder = _folder(pid, unit)
    if folder is None:
        _in_vain.add(bus)  # to wait for it once is enough
        return None
    # What the manager itself may not give is not there.
    files = {"memory": "memory.max", "pids": "pids.max"}
    if limits.cpus:
        files["cpu"] = "cpu.max"
    held = {name: str(folder) for name, file in files.items() if _limited(folder / file)}
    return Cgroup(2, held) if held else None


_in_vain: set[Path] = set()
"""Managers that took a request and did nothing of it."""


def _can_limit() -> bool:
    """Whether cgroups are of version 2: with version 1 users' managers can limit nothing."""
    root = cgroup.unified_folder("/")
    with contextlib.suppress(OSError):
        found = (root / "cgroup.controllers").read_text().split() if root else []
        return bool({"memory", "pids"} & set(found))
    return False


def _bus() -> Path | None:
    """The socket of the bus that a manager is on, which lives at least as long as this process."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    managers = [] if _outlives_sessions() else [(runtime, runtime / "bus")]
    if os.getuid() == 0:
        managers.append((Path("/run"), Path("/run/dbus/system_bus_socket")))
    for folder, bus in managers:
        if (folder / "systemd" / "private").is_socket() and bus.is_socket():
            return bus
    return None


def _outlives_sessions() -> bool:
    """Whether this is a system service of a user whose manager, with its scopes, ends at logout."""
    if not cgroup.own_unified_path().startswith("/system.slice/"):
        return False
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return True
    return not (_LINGERING / name).exists()


def _properties(pid: int, limits: Limits) -> list[str]:
    properties = {
        "Description": ["s", "A sandbox of sandbox-kernel"],
        "PIDs": ["au", "1", str(pid)],
        "CollectMode": ["s", "inactive-or-failed"],
        "MemoryMax": ["t", str(limits.memory)],
        "MemorySwapMax": ["t", "0"],
        "TasksMax": ["t", str(limits.processes)],
        "IOWeight": ["t", str(cgroup.IO_WEIGHT)],
        # Without this, systemd would end the scope when one process exceeds the memory limit.
        "Delegate": ["b", "true"],
    }
    if limits.cpus:
        properties["CPUQuotaPerSecUSec"] = ["t", str(int(limits.cpus * 1_000_000))]
        properties["CPUQuotaPeriodUSec"] = ["t", str(cgroup.CPU_PERIOD_US)]
    words = [str(len(properties))]
    for name, value in properties.items():
        words += [name, *value]
    return words


def _folder(pid: int, unit: str) -> Path | None:
    """The cgroup of the scope, once the process is in it: systemd answers before that."""
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            return None  # it has ended
        for line in lines:
            if line.startswith("0::") and line.endswith(f"/{unit}"):
                return cgroup.unified_folder(line[3:])
        time.sleep(_POLL)
    return None


def _limited(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return not file.read_text().startswith("max")
    return False
