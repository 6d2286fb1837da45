"""The local jail on cgroup v2 with all its controllers, which the rig's machine has.

The machines that the other tests run on may have version 1 only.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_kernel.sandboxes.local import LocalClient
from sandbox_kernel.sandboxes.local.cgroup import Cgroup
from sandbox_kernel.sandboxes.local.limits import MIB
from sandbox_kernel.spec import SandboxSpec
from tests.local.hogs import BOMB, HOG


async def _try(client: LocalClient) -> list[str]:
    spec = SandboxSpec(memory_mib=128, processes=40, cpus=0.5, start_timeout=600)
    handle = await client.create(spec)
    try:
        await handle.spawn(["sleep", "1000"])
        info = await handle.info()
        assert info.limits["memory_mib"] == "128 MiB (cgroup v2)"
        assert info.limits["processes"] == "40 (cgroup v2)"
        assert info.limits["cpus"] == "0.5 (cgroup v2)"
        assert not handle.weaknesses
        made = Cgroup.from_json(handle._record.data["cgroup"])
        assert made is not None
        folder = Path(made.folders["memory"])
        assert (folder / "memory.max").read_text() == f"{128 * MIB}\n"
        assert (folder / "memory.oom.group").read_text() == "0\n"
        assert (folder / "pids.max").read_text() == "40\n"
        assert (folder / "cpu.max").read_text() == "50000 100000\n"
        hog = await handle.exec("python3", ["-c", HOG], timeout=600)
        assert hog.exit_code == -9
        info = await handle.info()
        assert info.last_kill.startswith("out of memory: 'python3' used")
        assert (info.status, info.oom_kills, info.detail["processes"]) == ("running", 1, 1)
        bomb = await handle.exec("python3", ["-c", BOMB], timeout=600)
        assert bomb.stdout.startswith("refused ")
        assert int(bomb.stdout.split()[1]) < 40
        info = await handle.info()  # what is left of the bomb may still be dying
        assert (info.status, info.oom_kills) == ("running", 1)
        return list(made.folders.values())
    finally:
        await client.remove(handle.name)


def test_limits_are_held_by_cgroup_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, processes and CPUs; who takes too much memory is killed, and only that; nothing is
    left of it afterwards."""
    monkeypatch.setenv("SANDBOX_KERNEL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SANDBOX_KERNEL_RUNTIME_DIR", str(tmp_path / "run"))
    if "memory" not in Path("/sys/fs/cgroup/cgroup.controllers").read_text():
        pytest.skip("this machine has no cgroup v2 with controllers")
    folders = asyncio.run(_try(LocalClient()))
    assert not [folder for folder in folders if Path(folder).exists()]
