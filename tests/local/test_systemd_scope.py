"""A cgroup from systemd, where there is one.

No systemd runs where these tests do, and one that was started here would take the machine's
processes into its own cgroups. So ``busctl``, the program that speaks to it, is played by a script.
(``make test-systemd`` has a real one.)
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.local import LocalClient, cgroup, systemd_scope
from sandbox_kernel.sandboxes.local.limits import MIB, Limits
from sandbox_kernel.spec import SandboxSpec


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user manager that takes any request and does nothing; where its words are written down."""
    runtime = tmp_path / "run"
    (runtime / "systemd").mkdir(parents=True)
    program = tmp_path / "busctl"
    said = tmp_path / "said"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(systemd_scope, "_TIMEOUT", 0.2)
    monkeypatch.setattr(systemd_scope, "_can_limit", lambda: True)  # whatever this host has
    monkeypatch.setattr(systemd_scope, "_in_vain", set())
    with socket.socket(socket.AF_UNIX) as bus, socket.socket(socket.AF_UNIX) as private:
        monkeypatch.chdir(runtime)  # the path of a socket must be short
        bus.bind("bus")
        private.bind("systemd/private")
        yield said


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_what_the_manager_is_asked_for(asked: Path, pid: int) -> None:
    """A scope for this one process, with the sandbox's limits, that one process killed for want of
    memory does not end. A manager that does nothing of it gives no cgroup, and is asked once."""
    wanted = Limits.of(SandboxSpec(memory_mib=200, processes=50, cpus=1.5))
    assert systemd_scope.create("0123456789ab", pid, wanted) is None
    words = asked.read_text().splitlines()
    asked.unlink()
    assert systemd_scope.create("0123456789ab", pid, wanted) is None
    assert not asked.exists()  # it is not asked again
    unit = words.index("sandbox-kernel-0123456789ab.scope")
    assert words[unit - 2 : unit] == ["StartTransientUnit", "ssa(sv)a(sa(sv))"]
    said = " ".join(words[unit + 1 :])
    assert said.startswith("fail 10 ")
    assert f" PIDs au 1 {pid} " in said
    assert f" MemoryMax t {200 * MIB} MemorySwapMax t 0 TasksMax t 50 IOWeight t 50 " in said
    assert " Delegate b true " in said
    assert said.endswith(" CPUQuotaPerSecUSec t 1500000 CPUQuotaPeriodUSec t 100000 0")


@pytest.mark.usefixtures("asked")
def test_what_is_in_force_is_read_back(
    pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the scope's own files say is taken for a limit: a manager that was not given the
    controller for memory cannot hold it."""
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "pids.max").write_text("50\n")
    monkeypatch.setattr(systemd_scope, "_folder", lambda *_: tmp_path)
    made = systemd_scope.create("0123456789ab", pid, Limits.of(SandboxSpec(processes=50, cpus=1)))
    assert made is not None
    assert made.folders == {"pids": str(tmp_path)}


def test_nobody_is_asked_in_vain(
    asked: Path, pid: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not if cgroups are to be left alone, and not if there is no manager."""
    wanted = Limits.of(SandboxSpec())
    monkeypatch.setenv(cgroup.NO_CGROUP, "1")
    assert systemd_scope.create("0123456789ab", pid, wanted) is None
    monkeypatch.delenv(cgroup.NO_CGROUP)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert systemd_scope.create("0123456789ab", pid, wanted) is None
    assert not asked.exists()
    assert not os.path.exists(tmp_path / "systemd")


@pytest.mark.usefixtures("own_dirs")
async def test_the_manager_is_asked_first(asked: Path) -> None:
    """Also by who may make a cgroup itself: systemd takes the controllers of one that it has not
    made away again when it is told to reload (`cpus=0.5` was no limit any more)."""
    client = LocalClient()
    handle = await client.create(SandboxSpec(lease_seconds=60))
    await client.remove(handle.name)
    assert "StartTransientUnit" in asked.read_text()


def test_a_service_does_not_depend_on_a_login(
    asked: Path, pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is a service of the system's, and its user happens to be logged in. That user's
    manager ends when the user logs out, with every scope in it, and the kernels must not. If the
    user lingers, the manager stays."""
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    monkeypatch.setattr(cgroup, "own_unified_path", lambda: "/system.slice/hub.service")
    monkeypatch.setattr(systemd_scope, "_LINGERING", tmp_path)
    wanted = Limits.of(SandboxSpec())
    assert systemd_scope.create("0123456789ab", pid, wanted) is None
    assert not asked.exists()
    (tmp_path / pwd.getpwuid(65534).pw_name).touch()
    assert systemd_scope.create("0123456789ab", pid, wanted) is None
    assert asked.exists()
